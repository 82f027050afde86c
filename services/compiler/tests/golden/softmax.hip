#pragma clang fp contract(off)
#ifndef __device__
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#endif
#ifndef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#endif
static __device__ __forceinline__ void wooly_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
template <class To, class From> static __device__ __forceinline__ To wooly_bits(From from) {
  union { From from; To to; } both;
  both.from = from;
  return both.to;
}

static __device__ __forceinline__ float wooly_exp(float x) {
  const float v5 = __builtin_fmaf(x, 1.4426950216293335f, 12582912.0f);
  const float v7 = v5 - 12582912.0f;
  const float v14 = __builtin_fmaf(v7, 0.00021219444170128554f, __builtin_fmaf(v7, -0.693359375f, x));
  return (x <= 88.72283172607422f) ? ((x < (-87.33654022216797f)) ? 0.0f : (wooly_bits<float>((int)((unsigned int)(wooly_bits<int>(__builtin_fmaf(__builtin_fmaf(__builtin_fmaf(__builtin_fmaf(__builtin_fmaf(__builtin_fmaf(__builtin_fmaf(0.00019739456183742732f, v14, 0.0013935083989053965f), v14, 0.008333571255207062f), v14, 0.041666463017463684f), v14, 0.1666666567325592f), v14, 0.5f), v14, 1.0f), v14, 1.0f))) + (unsigned int)((int)((unsigned int)((int)((unsigned int)(wooly_bits<int>(v5)) - (unsigned int)1262485504)) << (23 & 31))))))) : (x + __builtin_inff());
}

extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(128, 128)))
k_softmax(const float* __restrict__ in0, float* __restrict__ out1) {
  __shared__ float row0[300];
  __shared__ float s2[128];
  __shared__ float s12[128];
  const long long t = (long long)__builtin_amdgcn_workitem_id_x();
  const long long p = (long long)__builtin_amdgcn_workgroup_id_x();
  const long long v0 = p;
  float a2 = -__builtin_inff();
  for (long long v3 = t; v3 < 300LL; v3 += 128) {
    const float v7 = in0[(v0 * 300LL) + v3];
    a2 = a2 != a2 ? a2 : (a2 > v7 ? a2 : v7);
  }
  s2[t] = a2;
  wooly_barrier();
  for (long long d = 64; d > 0; d >>= 1) {
    if (t < d) {
      s2[t] = s2[t] != s2[t] ? s2[t] : (s2[t] > s2[t + d] ? s2[t] : s2[t + d]);
    }
    wooly_barrier();
  }
  const float v2 = s2[0];
  float a12 = 0.0f;
  for (long long v13 = t; v13 < 300LL; v13 += 128) {
    const float v17 = in0[(v0 * 300LL) + v13];
    const float v19 = wooly_exp(v17 - v2);
    row0[v13] = v19;
    a12 = a12 + v19;
  }
  s12[t] = a12;
  wooly_barrier();
  for (long long d = 64; d > 0; d >>= 1) {
    if (t < d) {
      s12[t] = s12[t] + s12[t + d];
    }
    wooly_barrier();
  }
  const float v12 = s12[0];
  wooly_barrier();
  const float v24 = 1.0f / v12;
  for (long long v25 = t; v25 < 300LL; v25 += 128LL) {
    const float v26 = row0[v25];
    out1[(v0 * 300LL) + v25] = v26 * v24;
  }
}

template <class To, class From> static __device__ __forceinline__ To wooly_bits(From from) {
  union { From from; To to; } both;
  both.from = from;
  return both.to;
}

extern "C" __global__ void __launch_bounds__(128)
k_layer_norm_add(const float* __restrict__ in0, const float* __restrict__ in1, const float* __restrict__ in2, float* __restrict__ out3, const double p0) {
  __shared__ float s2[128];
  __shared__ float s14[128];
  const long long t = (long long)threadIdx.x;
  const long long p = (long long)blockIdx.x;
  const long long v0 = p;
  float a2 = 0.0f;
  for (long long v3 = t; v3 < 96LL; v3 += 128) {
    const float v7 = in0[(v0 * 96LL) + v3];
    a2 = a2 + v7;
  }
  s2[t] = a2;
  __syncthreads();
  for (long long d = 64; d > 0; d >>= 1) {
    if (t < d) {
      s2[t] = s2[t] + s2[t + d];
    }
    __syncthreads();
  }
  const float v2 = s2[0];
  const float v12 = v2 / 96.0f;
  float a14 = 0.0f;
  for (long long v15 = t; v15 < 96LL; v15 += 128) {
    const float v19 = in0[(v0 * 96LL) + v15];
    const float v20 = v19 - v12;
    const float v21 = v20 * v20;
    a14 = a14 + v21;
  }
  s14[t] = a14;
  __syncthreads();
  for (long long d = 64; d > 0; d >>= 1) {
    if (t < d) {
      s14[t] = s14[t] + s14[t + d];
    }
    __syncthreads();
  }
  const float v14 = s14[0];
  const float v31 = 1.0f / (sqrtf((v14 / 96.0f) + ((float)p0)));
  for (long long v32 = t; v32 < 96LL; v32 += 128LL) {
    const long long v35 = (v0 * 96LL) + v32;
    const float v36 = in0[v35];
    const float v38 = in2[v32];
    const float v39 = in1[v32];
    out3[v35] = ((((v36 - v12) * v31) * v39) + v38) + (1.0f * v36);
  }
}

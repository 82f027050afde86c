template <class To, class From> static __device__ __forceinline__ To wooly_bits(From from) {
  union { From from; To to; } both;
  both.from = from;
  return both.to;
}

extern "C" __global__ void __launch_bounds__(128)
k_mean_sub(const float* __restrict__ in0, float* __restrict__ out1) {
  __shared__ float s2[128];
  const long long t = (long long)threadIdx.x;
  const long long p = (long long)blockIdx.x;
  const long long v0 = p;
  float a2 = 0.0f;
  for (long long v3 = t; v3 < 132LL; v3 += 128) {
    const float v12 = in0[((v0 * 44LL) + ((v3 / 44LL) * 220LL)) + (v3 % 44LL)];
    a2 = a2 + v12;
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
  const float v19 = 1.0f * (v2 / 132.0f);
  for (long long v20 = t; v20 < 132LL; v20 += 128LL) {
    const long long v28 = ((v0 * 44LL) + ((v20 / 44LL) * 220LL)) + (v20 % 44LL);
    const float v29 = in0[v28];
    out1[v28] = v29 - v19;
  }
}

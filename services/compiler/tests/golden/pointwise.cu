template <class To, class From> static __device__ __forceinline__ To wooly_bits(From from) {
  union { From from; To to; } both;
  both.from = from;
  return both.to;
}

static __device__ __forceinline__ float wooly_bf16_to_f32(unsigned short x) {

  return wooly_bits<float>((unsigned int)(((unsigned int)(x)) << (16u & 31)));
}

extern "C" __global__ void __launch_bounds__(256)
k_mul_add_relu(const float* __restrict__ in0, const float* __restrict__ in1, const unsigned short* __restrict__ in2, float* __restrict__ out3) {
  const long long p = (long long)blockIdx.x * 256LL + (long long)threadIdx.x;
  if (p >= 3300LL) return;
  const long long v0 = p / 33LL;
  const long long v1 = p % 33LL;
  const unsigned short v2 = in2[v0];
  const float v6 = in1[v1];
  const long long v9 = (v0 * 33LL) + v1;
  const float v10 = in0[v9];
  const float v12 = (v10 * v6) + (1.0f * (wooly_bf16_to_f32(v2)));
  out3[v9] = (v12 < 0.0f) ? 0.0f : v12;
}

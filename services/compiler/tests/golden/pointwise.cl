#pragma OPENCL FP_CONTRACT OFF
#ifdef __clang__
#define F32(name) __builtin_##name##f
#define F64(name) __builtin_##name
#else
#define F32(name) name
#define F64(name) name
#endif

static inline float wooly_bf16_to_f32(ushort x) {

  return as_float((uint)(((uint)(x)) << (16u & 31)));
}

kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void k_mul_add_relu(global const float* restrict in0, global const float* restrict in1, global const ushort* restrict in2, global float* restrict out3) {
  const long g = (long)get_group_id(0) * 248L;
  const long end = (g + 248L < 100L ? g + 248L : 100L);
  for (long p = g; p < end; ++p) {
    const long v0 = p;
    for (long v1 = 0; v1 < 33L; ++v1) {
      const ushort v2 = in2[v0];
      const float v6 = in1[v1];
      const long v9 = (v0 * 33L) + v1;
      const float v10 = in0[v9];
      const float v12 = (v10 * v6) + (1.0f * (wooly_bf16_to_f32(v2)));
      out3[v9] = (v12 < 0.0f) ? 0.0f : v12;
    }
  }
}

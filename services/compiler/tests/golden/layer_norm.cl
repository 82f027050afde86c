#pragma OPENCL FP_CONTRACT OFF
#ifdef __clang__
#define F32(name) __builtin_##name##f
#define F64(name) __builtin_##name
#else
#define F32(name) name
#define F64(name) name
#endif

kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void k_layer_norm_add(global const float* restrict in0, global const float* restrict in1, global const float* restrict in2, global float* restrict out3, const double p0) {
  const long g = (long)get_group_id(0) * 28L;
  const long end = (g + 28L < 64L ? g + 28L : 64L);
  for (long p = g; p < end; ++p) {
    const long v0 = p;
    float a2[128];
    for (long l = 0; l < 128; ++l) { a2[l] = 0.0f; }
    for (long l = 0; l < 96; ++l) {
      const long v3 = 0L + l;
      const float v7 = in0[(v0 * 96L) + v3];
      a2[l] = a2[l] + v7;
    }
    for (long d = 64; d > 0; d >>= 1) {
      for (long l = 0; l < d; ++l) {
        a2[l] = a2[l] + a2[l + d];
      }
    }
    const float v2 = a2[0];
    const float v12 = v2 / 96.0f;
    float a14[128];
    for (long l = 0; l < 128; ++l) { a14[l] = 0.0f; }
    for (long l = 0; l < 96; ++l) {
      const long v15 = 0L + l;
      const float v19 = in0[(v0 * 96L) + v15];
      const float v20 = v19 - v12;
      const float v21 = v20 * v20;
      a14[l] = a14[l] + v21;
    }
    for (long d = 64; d > 0; d >>= 1) {
      for (long l = 0; l < d; ++l) {
        a14[l] = a14[l] + a14[l + d];
      }
    }
    const float v14 = a14[0];
    const float v31 = 1.0f / (F32(sqrt)((v14 / 96.0f) + ((float)p0)));
    for (long v32 = 0; v32 < 96L; ++v32) {
      const long v35 = (v0 * 96L) + v32;
      const float v36 = in0[v35];
      const float v38 = in2[v32];
      const float v39 = in1[v32];
      out3[v35] = ((((v36 - v12) * v31) * v39) + v38) + (1.0f * v36);
    }
  }
}

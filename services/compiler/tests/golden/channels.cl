#pragma OPENCL FP_CONTRACT OFF
#ifdef __clang__
#define F32(name) __builtin_##name##f
#define F64(name) __builtin_##name
#else
#define F32(name) name
#define F64(name) name
#endif

kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void k_mean_sub(global const float* restrict in0, global float* restrict out1) {
  const long g = (long)get_group_id(0) * 5L;
  const long end = g + 5L;
  for (long p = g; p < end; ++p) {
    const long v0 = p;
    float a2[128];
    for (long l = 0; l < 128; ++l) { a2[l] = 0.0f; }
    for (long o3 = 0; o3 < 3L; ++o3) {
      const long e3 = o3 * 44L;
      for (long j = e3 - e3 % 128; j < e3 + 44L; j += 128) {
        const long low = j < e3 ? e3 - j : 0;
        const long high = e3 + 44L - j < 128 ? e3 + 44L - j : 128;
        for (long l = low; l < high; ++l) {
          const long v3 = j + l;
          const long i3 = v3 - e3;
          const float v12 = in0[((v0 * 44L) + (o3 * 220L)) + i3];
          a2[l] = a2[l] + v12;
        }
      }
    }
    for (long d = 64; d > 0; d >>= 1) {
      for (long l = 0; l < d; ++l) {
        a2[l] = a2[l] + a2[l + d];
      }
    }
    const float v2 = a2[0];
    const float v19 = 1.0f * (v2 / 132.0f);
    for (long o20 = 0; o20 < 3L; ++o20) {
      const long e20 = o20 * 44L;
      for (long i20 = 0; i20 < 44L; ++i20) {
        const long v20 = e20 + i20;
        const long v28 = ((v0 * 44L) + (o20 * 220L)) + i20;
        const float v29 = in0[v28];
        out1[v28] = v29 - v19;
      }
    }
  }
}

// What operators.cpp and kernels.cpp tell each other. kernels.cpp is compiled once for each instruction set.
#pragma once

#include <cstdint>

namespace betternorm {

// Contiguous, (N, C, S), or channels last, (N, S, C), where S is the product of the spatial sizes.
struct Shape {
    int64_t examples, channels, space;
    int64_t groups;  // of examples: the first `examples % groups` have one example more than the others
    int64_t channels_per_group;
    bool channels_last;

    int64_t first_example(int64_t group) const {
        const int64_t size = examples / groups, larger = examples % groups;
        return group * size + (group < larger ? group : larger);
    }
};

// The work is cut into units: all examples of a group and `width` channels, whole channel groups. `chunk` rows (contiguous:
// examples) at a time are summed in cache, and the chunks joined in their order. Where there are fewer units than threads, the
// chunks of channels-last groups are worked on by themselves, `slices` to a group: sums, then joining, then writing. The
// numbers are the same either way.
struct Plan {
    int64_t width, across, chunk, slices;
    bool past;  // write past the caches
};

// out = (x - center) * slope + shift, and with dy: + dy * scale
struct Coefficients {
    float *center, *scale, *slope, *shift;

    Coefficients from(int64_t i) const { return {center + i, scale + i, slope + i, shift + i}; }
};

struct Forward {
    Shape shape;
    Plan plan;
    const void *x;
    const float *weight, *bias;  // may be null
    double eps;
    void *y;
    float *group_mean, *group_rstd;  // (groups, channels / channels_per_group)
    double *mean, *variance;         // (groups, channels)
    double *parts[2];                // of slices: (groups * slices, channels)
    Coefficients coefficients;       // of slices: (groups, channels)
};

struct Backward {
    Shape shape;
    Plan plan;
    const void *dy, *x;
    const float *weight;                         // may be null
    const float *group_mean, *group_rstd;
    void *dx;                                    // may be null
    double *sum, *dot;                           // of dy and dy * xhat, (groups, channels)
    double *parts[3];                            // of slices, as above
    Coefficients coefficients;
};

// Alpha has one value (`alpha_step` 0) or one per channel (1).
struct Infer {
    Shape shape;  // one group per example
    Plan plan;
    const void *x;
    const float *running_mean, *running_var, *weight, *bias, *alpha;
    int64_t alpha_step;
    double eps;
    void *y;
};

struct InferBackward : Infer {  // without y
    const void *dy;
    void *dx;                    // may be null
    double *dalpha, *dot, *sum;  // gradients of alpha, weight and bias, (examples, channels)
};

// Each does the units, slices or groups from `begin` to `end`.
struct Kernels {
    void (*forward)(const Forward &, int64_t begin, int64_t end);
    void (*forward_statistics)(const Forward &, int64_t begin, int64_t end);
    void (*forward_join)(const Forward &, int64_t begin, int64_t end);
    void (*forward_write)(const Forward &, int64_t begin, int64_t end);
    void (*backward)(const Backward &, int64_t begin, int64_t end);
    void (*backward_sums)(const Backward &, int64_t begin, int64_t end);
    void (*backward_join)(const Backward &, int64_t begin, int64_t end);
    void (*backward_write)(const Backward &, int64_t begin, int64_t end);
    void (*infer)(const Infer &, int64_t begin, int64_t end);
    void (*infer_backward)(const InferBackward &, int64_t begin, int64_t end);
};

enum Type { FLOAT32, BFLOAT16, FLOAT16, TYPES };

constexpr int64_t LANES = 16;
constexpr int64_t STRETCH = 256;  // values that a lane sums in float
constexpr int64_t LINES = 2;      // rows summed at once, enough to hide the time that an addition takes

#ifdef BETTERNORM_X86_LEVELS
extern const Kernels kernels_v2[TYPES], kernels_v3[TYPES], kernels_v4[TYPES];
#else
extern const Kernels kernels_v2[TYPES];
#endif

}  // namespace betternorm

// The operators of betternorm on CPU tensors, on torch's stable ABI: one binary for every torch from 2.10 on.
//
// Schemas, shape functions and gradients stand in backends/operators.py. This file checks what it is given, lays out the
// work, and hands it to kernels.cpp in the widest instruction set that the processor has.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels.h"

namespace betternorm {
namespace {

using torch::stable::Tensor;
using ScalarType = torch::headeronly::ScalarType;

constexpr int64_t SERIAL_BELOW = 32768;  // values below which threads cost more than they bring, as in ATen
constexpr int64_t WIDEST = 1024;         // channels last: channels of a unit, so much of a row is read at once
constexpr int64_t SHORT = 2048;          // contiguous: maps below which a unit takes several channels
constexpr int64_t CHUNK = 128 << 10;     // bytes that are summed and centered while they are in cache
constexpr int64_t BLOCK = 64;            // channels of a table that are added up at a time
// Bytes of an output from which on it is written past the caches in training: the layer by itself is then faster, and whole
// networks are as fast with any limit from 2 to 16 MB. At inference the input need not be kept, and there is room for both.
constexpr int64_t PAST_CACHES = 4 << 20;

const Kernels *best_kernels() {
#ifdef BETTERNORM_X86_LEVELS
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
        return kernels_v4;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
        __builtin_cpu_supports("f16c"))
        return kernels_v3;
#endif
    return kernels_v2;
}

const Kernels &kernels_for(ScalarType type) {
    static const Kernels *const kernels = best_kernels();
    switch (type) {
        case ScalarType::Float: return kernels[FLOAT32];
        case ScalarType::BFloat16: return kernels[BFLOAT16];
        case ScalarType::Half: return kernels[FLOAT16];
        default: STD_TORCH_CHECK(false, "betternorm: expected float32, bfloat16 or float16, got another dtype");
    }
    return kernels[FLOAT32];
}

// ---- tensors ----

bool is_channels_last(const Tensor &x) {
    const auto sizes = x.sizes(), strides = x.strides();
    const int64_t rank = x.dim();
    if (rank < 3) return false;
    int64_t expected = 1;
    for (int64_t i = 0; i < rank; i++) {
        const int64_t d = i == 0 ? 1 : i == rank - 1 ? 0 : rank - i;  // channels, then space from the last on, then examples
        if (sizes[d] != 1 && strides[d] != expected) return false;
        expected *= sizes[d];
    }
    return true;
}

// x itself where its values lie densely in one of the two layouts, else a contiguous copy.
Tensor dense(const Tensor &x) {
    return x.is_contiguous() || is_channels_last(x) ? x : torch::stable::contiguous(x);
}

Tensor laid_out_as(const Tensor &like, const Tensor &t) {
    const auto a = like.strides(), b = t.strides();
    const bool same = std::equal(a.begin(), a.end(), b.begin(), b.end());
    if (same && t.scalar_type() == like.scalar_type()) return t;
    Tensor copy = torch::stable::empty_like(like);
    torch::stable::copy_(copy, t);
    return copy;
}

void check_same_shape(const Tensor &dy, const Tensor &x) {
    const auto a = dy.sizes(), b = x.sizes();
    STD_TORCH_CHECK(std::equal(a.begin(), a.end(), b.begin(), b.end()), "betternorm: dy and x differ in shape");
    STD_TORCH_CHECK(dy.is_cpu(), "betternorm: dy is not on the CPU, and the input is");
}

// Those of `forward`: one value per group of examples and group of channels.
void check_statistics(const Tensor &x, const Tensor &mean, const Tensor &rstd) {
    for (const auto &[name, t] : {std::pair("mean", &mean), std::pair("rstd", &rstd)}) {
        STD_TORCH_CHECK(t->is_cpu() && t->scalar_type() == ScalarType::Float && t->dim() == 2 && t->is_contiguous(),
                        "betternorm: ", name, " has to be a contiguous float32 table (groups, channel groups) on the CPU");
        STD_TORCH_CHECK(t->size(0) == mean.size(0) && t->size(1) == mean.size(1), "betternorm: mean and rstd differ in shape");
    }
    STD_TORCH_CHECK(x.dim() >= 2 && mean.size(1) >= 1 && x.size(1) % mean.size(1) == 0, "betternorm: mean has ", mean.size(1),
                    " channel groups, which does not divide the channels of the input");
}

Tensor empty(std::vector<int64_t> sizes) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
    AtenTensorHandle made;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        sizes.size(), sizes.data(), strides.data(), aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &made));
    return Tensor(made);
}

float *numbers(const Tensor &t) { return (float *)t.mutable_data_ptr(); }

void check_vector(const char *name, const Tensor &t, int64_t channels) {
    STD_TORCH_CHECK(t.is_cpu(), "betternorm: ", name, " is not on the CPU, and the input is");
    STD_TORCH_CHECK(t.numel() == channels, "betternorm: ", name, " has ", t.numel(), " elements and the input has ",
                    channels, " channels");
}

// gamma, beta or a moving average as floats; `kept` owns what had to be converted.
const float *floats(const char *name, const std::optional<Tensor> &given, int64_t channels, std::vector<Tensor> &kept) {
    if (!given) return nullptr;
    check_vector(name, *given, channels);
    Tensor t = *given;
    if (t.scalar_type() != ScalarType::Float) t = torch::stable::to(t, ScalarType::Float);
    kept.push_back(t.is_contiguous() ? t : torch::stable::contiguous(t));
    return numbers(kept.back());
}

// ---- the layout of the work ----

Shape shape_of(const Tensor &x, int64_t groups, int64_t channels_per_group) {
    STD_TORCH_CHECK(x.dim() >= 2 && x.numel() > 0, "betternorm: expected an input (N, C, *) with values in it");
    const int64_t N = x.size(0), C = x.size(1), S = x.numel() / (N * C);
    STD_TORCH_CHECK(groups >= 1 && groups <= N, "betternorm: ", groups, " groups of ", N, " examples");
    STD_TORCH_CHECK(channels_per_group >= 1 && C % channels_per_group == 0, "betternorm: channels_per_group=",
                    channels_per_group, " does not divide the ", C, " channels");
    // Without space both layouts are the same memory, and the channels-last loops run along the channels.
    return {N, C, S, groups, channels_per_group, S == 1 || !x.is_contiguous()};
}

int64_t threads_for(const Shape &s) {
    return s.examples * s.channels * s.space < SERIAL_BELOW ? 1 : (int64_t)torch::stable::get_num_threads();
}

// `at_once`: bytes that stay in cache between two readings, or 0 where the values are read once before they are written.
Plan plan_for(const Shape &s, int64_t bytes_of_value, int64_t at_once, bool training) {
    const int64_t threads = threads_for(s), per = s.channels_per_group;
    const int64_t row = s.channels_last ? std::min(WIDEST, s.channels) : s.space;
    const int64_t rows = LINES * STRETCH;
    int64_t width = s.channels_last ? WIDEST : s.space * per > SHORT ? 1 : LANES, slices = 1;
    int64_t chunk = at_once ? std::clamp<int64_t>(at_once / (row * bytes_of_value), s.channels_last ? 32 : 1, rows) : rows;
    if (s.channels_last && s.groups * ((s.channels + width - 1) / width) < threads) {
        if (training) {
            slices = ((s.examples + s.groups - 1) / s.groups * s.space + chunk - 1) / chunk;
            width = s.channels;
        } else {
            while (width > LANES && s.groups * ((s.channels + width - 1) / width) < threads) width /= 2;
        }
    }
    width = std::min((width + per - 1) / per * per, s.channels);
    const bool past = training && s.examples * s.channels * s.space * bytes_of_value >= PAST_CACHES;
    return {width, (s.channels + width - 1) / width, chunk, slices, past};
}

template <class Arguments>
void each(const Arguments &a, int64_t count, void (*work)(const Arguments &, int64_t, int64_t)) {
    if (threads_for(a.shape) == 1) return work(a, 0, count);
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) { work(a, begin, end); });
}

// Room for the numbers of one operator: tables of (groups, channels), the batch's own, and what slices leave behind. A thread
// keeps it from call to call, since pages that are asked for anew each time cost more than what is computed in them.
struct Room {
    double *tables[3], *batch[2], *parts[3];
    Coefficients coefficients;

    Room(const Shape &s, const Plan &plan, int64_t count = 2) {
        static thread_local std::vector<double> held;
        const int64_t C = s.channels, table = s.groups * C, part = plan.slices > 1 ? table * plan.slices : 0;
        const size_t size = count * table + 2 * C + (part ? 3 * part + 2 * table : 0);
        if (held.size() < size) held.resize(size);
        double *next = held.data();
        const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
        for (int64_t i = 0; i < count; i++) tables[i] = take(table);
        for (double *&t : batch) t = take(C);
        if (!part) return;
        for (double *&t : parts) t = take(part);
        float *const k = (float *)take(2 * table);
        coefficients = {k, k + table, k + 2 * table, k + 3 * table};
    }
};

// ---- tables of (groups, channels) ----

// `work(first channel, width)` for every block of channels of a table.
template <class Work> void each_block(int64_t rows, int64_t C, const Work &work) {
    const int64_t blocks = (C + BLOCK - 1) / BLOCK;
    const auto some = [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) work(i * BLOCK, std::min(BLOCK, C - i * BLOCK));
    };
    if (rows * C < SERIAL_BELOW / 4) some(0, blocks);
    else torch::stable::parallel_for(0, blocks, 1, some);
}

// Mean and biased variance over the whole batch, from those of the groups.
void batch_statistics(const Shape &s, const double *mean, const double *variance, double *batch_mean,
                      double *batch_variance) {
    const int64_t C = s.channels;
    each_block(s.groups, C, [&](int64_t c0, int64_t width) {
        double m[BLOCK] = {}, v[BLOCK] = {};
        for (int pass = 0; pass < 2; pass++)
            for (int64_t g = 0; g < s.groups; g++) {
                const double share = (double)(s.first_example(g + 1) - s.first_example(g)) / s.examples;
                const double *gm = mean + g * C + c0, *gv = variance + g * C + c0;
                if (pass == 0)
                    for (int64_t c = 0; c < width; c++) m[c] += share * gm[c];
                else
                    for (int64_t c = 0; c < width; c++) v[c] += share * (gv[c] + (gm[c] - m[c]) * (gm[c] - m[c]));
            }
        std::copy(m, m + width, batch_mean + c0);
        std::copy(v, v + width, batch_variance + c0);
    });
}

void add_rows(int64_t rows, int64_t C, const double *table, double *to) {
    each_block(rows, C, [&](int64_t c0, int64_t width) {
        double sum[BLOCK] = {};
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < width; c++) sum[c] += table[r * C + c0 + c];
        std::copy(sum, sum + width, to + c0);
    });
}

// ---- operators ----

struct Trained {
    Tensor y, mean, rstd;
    const double *batch_mean, *batch_variance;  // until the next call
};

Trained train(const Tensor &given, const std::optional<Tensor> &weight, const std::optional<Tensor> &bias, int64_t groups,
              int64_t channels_per_group, double eps) {
    const Tensor x = dense(given);
    const Shape s = shape_of(x, groups, channels_per_group);
    const Plan plan = plan_for(s, x.element_size(), CHUNK, true);
    const Kernels &kernels = kernels_for(x.scalar_type());
    const Room room(s, plan);
    const int64_t C = s.channels, K = C / channels_per_group;
    std::vector<Tensor> kept;
    const float *const gamma = floats("weight", weight, C, kept), *const beta = floats("bias", bias, C, kept);
    Trained t{torch::stable::empty_like(x), empty({groups, K}), empty({groups, K}), room.batch[0], room.batch[1]};
    const Forward a{s, plan, x.const_data_ptr(), gamma, beta, eps, t.y.mutable_data_ptr(), numbers(t.mean), numbers(t.rstd),
                    room.tables[0], room.tables[1], {room.parts[0], room.parts[1]}, room.coefficients};
    if (plan.slices == 1) {
        each(a, groups * plan.across, kernels.forward);
    } else {
        each(a, groups * plan.slices, kernels.forward_statistics);
        each(a, groups, kernels.forward_join);
        each(a, groups * plan.slices, kernels.forward_write);
    }
    batch_statistics(s, a.mean, a.variance, room.batch[0], room.batch[1]);
    return t;
}

Tensor as_floats(const double *values, int64_t count) {
    const Tensor t = empty({count});
    std::copy(values, values + count, numbers(t));
    return t;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(const Tensor &x, const std::optional<Tensor> &weight,
                                                           const std::optional<Tensor> &bias, int64_t groups,
                                                           int64_t channels_per_group, double eps) {
    const Trained t = train(x, weight, bias, groups, channels_per_group, eps);
    return {t.y, t.mean, t.rstd, as_floats(t.batch_mean, x.size(1)), as_floats(t.batch_variance, x.size(1))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward_and_track(
    const Tensor &x, const std::optional<Tensor> &weight, const std::optional<Tensor> &bias, int64_t groups,
    int64_t channels_per_group, double eps, Tensor running_mean, Tensor running_var, double momentum,
    std::optional<Tensor> batches) {
    for (const auto &[name, t] : {std::pair("running_mean", &running_mean), std::pair("running_var", &running_var)}) {
        check_vector(name, *t, x.size(1));
        STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float && t->is_contiguous(), "betternorm: ", name,
                        " has to be contiguous float32");
    }
    if (batches) {
        STD_TORCH_CHECK(batches->is_cpu() && batches->scalar_type() == ScalarType::Long && batches->numel() == 1,
                        "betternorm: num_batches_tracked has to be one int64 on the CPU");
    }
    const Trained t = train(x, weight, bias, groups, channels_per_group, eps);
    if (batches) ++*(int64_t *)batches->mutable_data_ptr();
    float *M = numbers(running_mean), *V = numbers(running_var);
    for (int64_t c = 0; c < x.size(1); c++) {
        const double step = t.batch_mean[c] - M[c], rest = 1 - momentum;
        V[c] = (float)(rest * V[c] + momentum * t.batch_variance[c] + momentum * rest * step * step);
        // Not a step from where it is: infinity would turn into NaN one batch later, and in torch's layer it does not.
        M[c] = (float)(rest * M[c] + momentum * t.batch_mean[c]);
    }
    return {t.y, t.mean, t.rstd, as_floats(t.batch_mean, x.size(1)), as_floats(t.batch_variance, x.size(1))};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor &given_dy, const Tensor &given_x,
                                            const std::optional<Tensor> &weight, const Tensor &mean, const Tensor &rstd,
                                            bool need_dx) {
    check_same_shape(given_dy, given_x);
    check_statistics(given_x, mean, rstd);
    const Tensor x = dense(given_x), dy = laid_out_as(x, given_dy);
    const int64_t C = x.size(1), G = mean.size(0), K = mean.size(1);
    const Shape s = shape_of(x, G, C / K);
    const Plan plan = plan_for(s, x.element_size(), 0, true);
    const Kernels &kernels = kernels_for(x.scalar_type());
    const Room room(s, plan);
    std::vector<Tensor> kept;
    const float *const gamma = floats("weight", weight, C, kept);
    const Tensor dx = need_dx ? torch::stable::empty_like(x) : empty({0});
    const Backward a{s, plan, dy.const_data_ptr(), x.const_data_ptr(), gamma, numbers(mean), numbers(rstd),
                     need_dx ? dx.mutable_data_ptr() : nullptr, room.tables[0], room.tables[1],
                     {room.parts[0], room.parts[1], room.parts[2]}, room.coefficients};
    if (plan.slices == 1) {
        each(a, G * plan.across, kernels.backward);
    } else {
        each(a, G * plan.slices, kernels.backward_sums);
        each(a, G, kernels.backward_join);
        if (need_dx) each(a, G * plan.slices, kernels.backward_write);
    }
    add_rows(G, C, a.dot, room.batch[0]);
    add_rows(G, C, a.sum, room.batch[1]);
    return {dx, as_floats(room.batch[0], C), as_floats(room.batch[1], C)};
}

// `x` is dense; `kept` owns what had to be converted.
Infer inference(const Tensor &x, const Tensor &running_mean, const Tensor &running_var, const std::optional<Tensor> &weight,
                const std::optional<Tensor> &bias, const Tensor &alpha, int64_t channels_per_group, double eps, int64_t at_once,
                std::vector<Tensor> &kept) {
    const Shape s = shape_of(x, x.size(0), channels_per_group);
    const int64_t C = s.channels, alphas = alpha.numel() == 1 ? 1 : C;
    return {s, plan_for(s, x.element_size(), at_once, false), x.const_data_ptr(),
            floats("running_mean", running_mean, C, kept), floats("running_var", running_var, C, kept),
            floats("weight", weight, C, kept), floats("bias", bias, C, kept), floats("alpha", alpha, alphas, kept),
            alphas > 1, eps, nullptr};
}

Tensor infer(const Tensor &given, const Tensor &running_mean, const Tensor &running_var, const std::optional<Tensor> &weight,
             const std::optional<Tensor> &bias, const Tensor &alpha, int64_t channels_per_group, double eps) {
    const Tensor x = dense(given), y = torch::stable::empty_like(x);
    std::vector<Tensor> kept;
    Infer a = inference(x, running_mean, running_var, weight, bias, alpha, channels_per_group, eps, CHUNK, kept);
    a.y = y.mutable_data_ptr();
    each(a, a.shape.groups * a.plan.across, kernels_for(x.scalar_type()).infer);
    return y;
}

// Gradients of x, alpha, weight and bias; those of the last three are vectors of all channels.
std::tuple<Tensor, Tensor, Tensor, Tensor> infer_backward(
    const Tensor &given_dy, const Tensor &given_x, const Tensor &running_mean, const Tensor &running_var,
    const std::optional<Tensor> &weight, const Tensor &alpha, int64_t channels_per_group, double eps, bool need_dx) {
    check_same_shape(given_dy, given_x);
    const Tensor x = dense(given_x), dy = laid_out_as(x, given_dy);
    const Tensor dx = need_dx ? torch::stable::empty_like(x) : empty({0});
    std::vector<Tensor> kept;
    InferBackward a{inference(x, running_mean, running_var, weight, std::nullopt, alpha, channels_per_group, eps, 0, kept)};
    const Shape &s = a.shape;
    const Plan &plan = a.plan;
    const Room room(s, plan, 3);
    const int64_t C = s.channels;
    a.dy = dy.const_data_ptr();
    a.dx = need_dx ? dx.mutable_data_ptr() : nullptr;
    a.dalpha = room.tables[0], a.dot = room.tables[1], a.sum = room.tables[2];
    each(a, s.groups * plan.across, kernels_for(x.scalar_type()).infer_backward);
    const auto total = [&](const double *table) {
        add_rows(s.groups, C, table, room.batch[0]);
        return as_floats(room.batch[0], C);
    };
    return {dx, total(a.dalpha), total(a.dot), total(a.sum)};
}

}  // namespace
}  // namespace betternorm

STABLE_TORCH_LIBRARY_IMPL(betternorm, CPU, m) {
    m.impl("forward", TORCH_BOX(betternorm::forward));
    m.impl("forward_and_track", TORCH_BOX(betternorm::forward_and_track));
    m.impl("backward", TORCH_BOX(betternorm::backward));
    m.impl("infer", TORCH_BOX(betternorm::infer));
    m.impl("infer_backward", TORCH_BOX(betternorm::infer_backward));
}

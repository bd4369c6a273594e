// Grouped batch normalization on the CPU, one trip through memory for each group that fits into the cache.
//
// A group is a run of consecutive examples times a run of consecutive channels times space. Its values are summed,
// centered and written while they are in cache, which torch's own kernels do not do. backends/plain.py has the same
// mathematics in readable form and is the oracle of this file.
//
// Lanes sum a few hundred values in float before they are added up in double. Every chunk of values is centered by its own
// mean, and that mean is corrected by the mean of the residuals, so that a large mean costs no digits.
//
// Compiled once for each instruction set. Everything but the table at the end has internal linkage and nothing comes from
// the standard library's headers: the linker would take one copy of an inline function for all instruction sets.

#include "kernels.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace betternorm {
namespace {

#define INLINE inline __attribute__((always_inline))

// ---- sixteen values at a time, as float32 ----

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef float vec8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef double wide __attribute__((vector_size(128), aligned(8), may_alias));
typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t shorts __attribute__((vector_size(32), aligned(2), may_alias));

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }

INLINE vec load(const bfloat16 *p) {
    const words wide = __builtin_convertvector(*(const shorts *)p, words) << 16;
    return (vec)wide;
}
INLINE void store(bfloat16 *p, vec v) {
    const words w = (words)v;
    const words rounded = (w + 0x7fff + ((w >> 16) & 1)) >> 16;  // to nearest, ties to even
    const words quiet = (w >> 16) | 0x40;                        // NaN, which rounding could turn into infinity
    *(shorts *)p = __builtin_convertvector((words)(v == v ? rounded : quiet), shorts);
}

#if defined(__AVX512F__)
INLINE vec load(const float16 *p) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void store(float16 *p, vec v) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__F16C__)
INLINE vec load(const float16 *p) {
    vec v;
    ((vec8 *)&v)[0] = (vec8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    ((vec8 *)&v)[1] = (vec8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)));
    return v;
}
INLINE void store(float16 *p, vec v) {
    for (int i = 0; i < 2; i++)
        _mm_storeu_si128((__m128i *)(p + 8 * i), _mm256_cvtps_ph((__m256)((const vec8 *)&v)[i], 0));
}
#else
INLINE float as_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
    if (exponent == 0) {
        const float small = (float)fraction * 0x1p-24f;
        return sign ? -small : small;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
}
INLINE uint16_t narrowed(float f) {
    uint32_t bits;
    __builtin_memcpy(&bits, &f, sizeof bits);
    const uint16_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to infinity
    if (bits < 0x38800000) {                       // subnormal: let the addition of a half do the rounding
        float magnitude;
        __builtin_memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude += 0.5f;
        __builtin_memcpy(&bits, &magnitude, sizeof bits);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    return sign | (uint16_t)((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13);
}
INLINE vec load(const float16 *p) {
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = as_float(p[i].bits);
    return v;
}
INLINE void store(float16 *p, vec v) {
    for (int i = 0; i < LANES; i++) p[i].bits = narrowed(v[i]);
}
#endif

// Past the caches, for what is too large to be in them when it is read again: a line that is written whole is then not read
// before. `p` is a multiple of LINE.
constexpr uint64_t LINE = 64;
#if defined(__SSE2__)
template <class T> INLINE void store_past(T *p, vec v) {
    alignas(64) T values[LANES];
    store(values, v);
#if defined(__AVX512F__)
    for (uint64_t i = 0; i < sizeof values / 32; i++)
        _mm256_stream_si256((__m256i *)p + i, _mm256_load_si256((const __m256i *)values + i));
#else
    for (uint64_t i = 0; i < sizeof values / 16; i++)
        _mm_stream_si128((__m128i *)p + i, _mm_load_si128((const __m128i *)values + i));
#endif
}
#if defined(__AVX512F__)
INLINE void store_past(float *p, vec v) { _mm512_stream_ps(p, (__m512)v); }
#endif
INLINE void finish_stores() { _mm_sfence(); }
#else
template <class T> INLINE void store_past(T *p, vec v) { store(p, v); }
INLINE void finish_stores() {}
#endif

// Fewer than LANES values; the others are zero, and are not written.
template <class T> INLINE vec load_some(const T *p, int64_t count) {
    T values[LANES] = {};
    for (int64_t i = 0; i < count; i++) values[i] = p[i];
    return load(values);
}
template <class T> INLINE void store_some(T *p, vec v, int64_t count) {
    T values[LANES];
    store(values, v);
    for (int64_t i = 0; i < count; i++) p[i] = values[i];
}

INLINE wide widened(vec v) { return __builtin_convertvector(v, wide); }
INLINE vec splat(float f) { return f - (vec){0}; }
INLINE vec first_lanes(vec v, int64_t count) {
    for (int64_t i = 0; i < LANES; i++) v[i] = i < count ? v[i] : 0;
    return v;
}
INLINE float total(vec v) {
    const vec8 *halves = (const vec8 *)&v;
    const vec8 a = halves[0] + halves[1];
    const vec4 *quarters = (const vec4 *)&a;
    const vec4 b = quarters[0] + quarters[1];
    return (b[0] + b[1]) + (b[2] + b[3]);
}

// ---- where a unit lies ----

// Channels last: `rows` rows of `width` values, `stride` apart. Contiguous: `width` channels, `space` apart, of `runs` runs of
// `space` values, `stride` apart.
struct Block {
    int64_t start, rows, runs, width, stride, space;
    bool channels_last;

    int64_t steps() const { return channels_last ? rows : runs; }
    int64_t values() const { return rows * runs * space; }  // of each channel
    Block part(int64_t from, int64_t to) const {
        Block b = *this;
        b.start += from * stride;
        (channels_last ? b.rows : b.runs) = to - from;
        return b;
    }
};

INLINE Block unit_block(const Shape &s, int64_t group, int64_t c0, int64_t width) {
    const int64_t n0 = s.first_example(group), n1 = s.first_example(group + 1);
    if (s.channels_last) return {n0 * s.space * s.channels + c0, (n1 - n0) * s.space, 1, width, s.channels, 1, true};
    return {(n0 * s.channels + c0) * s.space, 1, n1 - n0, width, s.channels * s.space, s.space, false};
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Room for a unit's numbers, for as long as a thread works on units. Vectors do not cross lines of the cache.
struct Scratch {
    int64_t padded;  // width in whole vectors
    void *held;
    double *a, *b, *c, *d, *e, *f;
    Coefficients k;
    float *better;
    float *lines;  // LINES rows of up to four sums

    explicit Scratch(int64_t width) : padded((width + LANES - 1) / LANES * LANES) {
        held = __builtin_malloc(LINE + padded * (6 * sizeof(double) + (5 + 4 * LINES) * sizeof(float)));
        a = (double *)(((uint64_t)held + LINE - 1) / LINE * LINE);
        b = a + padded, c = b + padded, d = c + padded, e = d + padded, f = e + padded;
        float *const floats = (float *)(f + padded);
        k = {floats, floats + padded, floats + 2 * padded, floats + 3 * padded};
        better = floats + 4 * padded;
        lines = floats + 5 * padded;
    }
    Scratch(const Scratch &) = delete;
    ~Scratch() { __builtin_free(held); }
};

// ---- sums for each channel over a block ----

enum Term { MOMENTS, PRODUCTS, BOTH };
// MOMENTS: x - center and its square. PRODUCTS: dy, dy * (x - center) and x - center. BOTH: PRODUCTS and the square.

template <Term term> constexpr int sums_of() { return term == MOMENTS ? 2 : term == PRODUCTS ? 3 : 4; }

template <Term term> INLINE void add(vec *sum, vec x, vec dy, vec center) {
    const vec d = x - center;
    if (term == MOMENTS) {
        sum[0] += d;
        sum[1] += d * d;
    } else {
        sum[0] += dy;
        sum[1] += dy * d;
        sum[2] += d;
        if (term == BOTH) sum[3] += d * d;
    }
}

template <Term term, class T>
INLINE void sums_of_channel(const Block &b, const T *x, const T *dy, float center, double *const *out, int64_t at) {
    constexpr int K = sums_of<term>();
    const vec m = splat(center);
    const int64_t S = b.space, tail = S % LANES;
    double all[K] = {};
    vec sum[2][K] = {};
    int64_t covered = 0;
    for (int64_t n = 0; n < b.runs; n++, x += b.stride, dy += b.stride) {
        int64_t i = 0;
        while (i + LANES <= S) {
            const int64_t stop = least(S - tail, i + STRETCH * LANES);
            covered += stop - i;
            for (; i + 2 * LANES <= stop; i += 2 * LANES)
                for (int j = 0; j < 2; j++) {
                    const vec e = term != MOMENTS ? load(dy + i + j * LANES) : m;
                    add<term>(sum[j], load(x + i + j * LANES), e, m);
                }
            if (i < stop) {
                add<term>(sum[0], load(x + i), term != MOMENTS ? load(dy + i) : m, m);
                i += LANES;
            }
            if (covered >= STRETCH * LANES) {
                for (int k = 0; k < K; k++) {
                    all[k] += total(sum[0][k] + sum[1][k]);
                    sum[0][k] = sum[1][k] = (vec){0};
                }
                covered = 0;
            }
        }
        if (tail) {
            vec rest[K] = {};
            add<term>(rest, load_some(x + i, tail), term != MOMENTS ? load_some(dy + i, tail) : m, m);
            for (int k = 0; k < K; k++) sum[1][k] += first_lanes(rest[k], tail);
            covered += LANES;
        }
    }
    for (int k = 0; k < K; k++) out[k][at] = all[k] + total(sum[0][k] + sum[1][k]);
}

// Channels last. A row is summed into `lines`, of which there are LINES, in turn: memory is read from one end to the other,
// and the sums stay in the first cache. Up to NARROW channels they stay in registers. Number and order of the sums is the
// same in both ways and for every channel, so that a result does not depend on how the work was divided.
constexpr int64_t NARROW = 4 * LANES;

template <Term term, class T>
INLINE void sums_of_row(int64_t width, const T *x, const T *dy, const float *center, float *line, int64_t padded) {
    constexpr int K = sums_of<term>();
    int64_t c = 0;
    for (; c + LANES <= width; c += LANES) {
        vec sum[K];
        const vec m = load(center + c);
        for (int k = 0; k < K; k++) sum[k] = load(line + k * padded + c);
        add<term>(sum, load(x + c), term != MOMENTS ? load(dy + c) : m, m);
        for (int k = 0; k < K; k++) store(line + k * padded + c, sum[k]);
    }
    if (c < width) {
        vec sum[K];
        const int64_t n = width - c;
        const vec m = load_some(center + c, n);
        for (int k = 0; k < K; k++) sum[k] = load(line + k * padded + c);
        add<term>(sum, load_some(x + c, n), term != MOMENTS ? load_some(dy + c, n) : m, m);
        for (int k = 0; k < K; k++) store(line + k * padded + c, sum[k]);
    }
}

template <Term term, int vectors, class T>
INLINE void sums_of_narrow_rows(int64_t rows, int64_t stride, const T *x, const T *dy, const float *center, float *lines,
                                int64_t padded, int64_t width) {
    constexpr int K = sums_of<term>(), count = vectors ? vectors : 1;
#define GET(p, v) (vectors ? load((p) + (v) * LANES) : load_some(p, width))
    vec m[count], sum[LINES][count][K] = {};
    for (int v = 0; v < count; v++) m[v] = GET(center, v);
    int64_t row = 0;
    for (; row + LINES <= rows; row += LINES, x += LINES * stride, dy += LINES * stride)
        for (int j = 0; j < LINES; j++)
            for (int v = 0; v < count; v++) {
                const vec e = term != MOMENTS ? GET(dy + j * stride, v) : m[v];
                add<term>(sum[j][v], GET(x + j * stride, v), e, m[v]);
            }
    if (row < rows)
        for (int v = 0; v < count; v++) add<term>(sum[0][v], GET(x, v), term != MOMENTS ? GET(dy, v) : m[v], m[v]);
    for (int j = 0; j < LINES; j++)
        for (int v = 0; v < count; v++)
            for (int k = 0; k < K; k++) store(lines + (j * K + k) * padded + v * LANES, sum[j][v][k]);
#undef GET
}

template <Term term, class T>
void sums(const Block &b, const T *x, const T *dy, const float *center, const Scratch &s, double *const *out) {
    constexpr int K = sums_of<term>();
    x += b.start;
    dy += b.start;
    if (!b.channels_last) {
        for (int64_t c = 0; c < b.width; c++)
            sums_of_channel<term>(b, x + c * b.space, dy + c * b.space, center[c], out, c);
        return;
    }
    const int64_t padded = s.padded;
    for (int k = 0; k < K; k++) __builtin_memset(out[k], 0, b.width * sizeof(double));
    for (int64_t begin = 0; begin < b.rows; begin += LINES * STRETCH) {
        const int64_t end = least(b.rows, begin + LINES * STRETCH);
        const T *from = x + begin * b.stride, *dy_from = dy + begin * b.stride;
        int64_t c = 0;
        if (b.width <= NARROW) {
            for (; c + 4 * LANES <= b.width; c += 4 * LANES)
                sums_of_narrow_rows<term, 4>(end - begin, b.stride, from + c, dy_from + c, center + c, s.lines + c, padded, 0);
            for (; c + LANES <= b.width; c += LANES)
                sums_of_narrow_rows<term, 1>(end - begin, b.stride, from + c, dy_from + c, center + c, s.lines + c, padded, 0);
            if (c < b.width)
                sums_of_narrow_rows<term, 0>(end - begin, b.stride, from + c, dy_from + c, center + c, s.lines + c, padded,
                                             b.width - c);
        } else {
            __builtin_memset(s.lines, 0, LINES * K * padded * sizeof(float));
            for (int64_t row = begin; row < end; row++, from += b.stride, dy_from += b.stride)
                sums_of_row<term>(b.width, from, dy_from, center, s.lines + (row - begin) % LINES * K * padded, padded);
        }
        for (int k = 0; k < K; k++)
            for (int64_t c = 0; c < b.width; c++)
                out[k][c] += (double)s.lines[k * padded + c] + (double)s.lines[(K + k) * padded + c];
    }
}

// Whether a guess of the mean was near enough for the variance about it to be exact: what is subtracted is then at most 16
// times what remains.
INLINE bool is_near(double guess, double mean, double variance) {
    return (mean - guess) * (mean - guess) <= 16 * variance;
}

// Mean and biased variance of every channel of a block, from sums about a guess of the mean. Returns whether all were near.
template <class T>
bool statistics_about(const Block &b, const T *x, const float *guess, const Scratch &s, double *mean, double *variance) {
    double *const moments[] = {mean, variance};
    const double share = 1 / (double)b.values();
    bool near = true;
    sums<MOMENTS>(b, x, x, guess, s, moments);
    for (int64_t c = 0; c < b.width; c++) {
        const double from = guess[c], off = mean[c] * share, v = variance[c] * share - off * off;
        mean[c] = from - from == 0 ? from + off : from;  // else it is infinite or NaN already, and stays so
        variance[c] = v < 0 ? 0 : v;                     // in this order NaN stays NaN
        near &= is_near(from, mean[c], variance[c]);
    }
    return near;
}

// The same, with a second reading for the channels whose guess was far.
template <class T>
void statistics_near(const Block &b, const T *x, float *guess, const Scratch &s, double *mean, double *variance) {
    if (statistics_about(b, x, guess, s, mean, variance)) return;
    for (int64_t c = 0; c < b.width; c++) s.better[c] = (float)mean[c];
    statistics_about(b, x, s.better, s, s.e, s.f);
    for (int64_t c = 0; c < b.width; c++)
        if (!is_near(guess[c], mean[c], variance[c])) {
            mean[c] = s.e[c];
            variance[c] = s.f[c];
        }
}

// Without a guess: the mean of the first few rows is one, or that of the first few values of each channel.
template <class T> void guess_mean(const Block &b, const T *x, float *guess) {
    constexpr int64_t FEW = 4;
    x += b.start;
    if (!b.channels_last) {
        for (int64_t c = 0; c < b.width; c++, x += b.space) {
            const int64_t vectors = least(FEW, b.space / LANES);
            vec sum = vectors ? load(x) : load_some(x, b.space);
            for (int64_t i = 1; i < vectors; i++) sum += load(x + i * LANES);
            guess[c] = total(sum) / (float)(vectors ? vectors * LANES : b.space);
        }
        return;
    }
    const int64_t rows = least(FEW, b.rows);
    for (int64_t c = 0; c < b.width; c += LANES) {
        const int64_t n = least(LANES, b.width - c);
        vec sum = (vec){0};
        for (int64_t row = 0; row < rows; row++) {
            const T *const p = x + row * b.stride + c;
            sum += n == LANES ? load(p) : load_some(p, n);
        }
        store(guess + c, sum / splat((float)rows));
    }
}

template <class T>
void statistics_of_chunk(const Block &b, const T *x, const Scratch &s, double *mean, double *variance) {
    guess_mean(b, x, s.k.center);
    statistics_near(b, x, s.k.center, s, mean, variance);
}

// Join the statistics of a further chunk, which is `share` of all so far, by the law of total variance.
INLINE void join(int64_t width, double share, const double *more_mean, const double *more_variance, double *mean,
                 double *variance) {
    const double rest = 1 - share;
    for (int64_t c = 0; c < width; c++) {
        const double step = more_mean[c] - mean[c];
        variance[c] = rest * variance[c] + share * more_variance[c] + share * rest * step * step;
        mean[c] = rest * mean[c] + share * more_mean[c];
    }
}

template <class T>
void statistics(const Block &whole, int64_t chunk, const T *x, const Scratch &s, double *mean, double *variance) {
    const int64_t steps = whole.steps();
    statistics_of_chunk(whole.part(0, least(steps, chunk)), x, s, mean, variance);
    for (int64_t from = chunk; from < steps; from += chunk) {
        const int64_t to = least(steps, from + chunk);
        statistics_of_chunk(whole.part(from, to), x, s, s.a, s.b);
        join(whole.width, (double)(to - from) / to, s.a, s.b, mean, variance);
    }
}

// ---- one value out for every value of a block ----

template <bool with_dy>
INLINE vec value(vec x, vec dy, vec center, vec scale, vec slope, vec shift) {
    const vec own = (x - center) * slope + shift;
    return with_dy ? dy * scale + own : own;
}

// `past`: whether past the caches.
template <bool with_dy, bool past, class T>
INLINE void write_channel(const Block &b, const T *x, const T *dy, const Coefficients &k, int64_t c, T *out) {
    const vec center = splat(k.center[c]), slope = splat(k.slope[c]), shift = splat(k.shift[c]);
    const vec scale = with_dy ? splat(k.scale[c]) : slope;
    const int64_t tail = b.space % LANES, whole = b.space - tail;
    for (int64_t n = 0; n < b.runs; n++, x += b.stride, dy += b.stride, out += b.stride) {
        for (int64_t i = 0; i < whole; i += LANES) {
            const vec v = value<with_dy>(load(x + i), with_dy ? load(dy + i) : slope, center, scale, slope, shift);
            past ? store_past(out + i, v) : store(out + i, v);
        }
        if (tail) {
            const vec e = with_dy ? load_some(dy + whole, tail) : slope;
            const vec v = value<with_dy>(load_some(x + whole, tail), e, center, scale, slope, shift);
            store_some(out + whole, v, tail);
        }
    }
}

// A whole row after the other, with the coefficients from the first cache: the memory's bandwidth is what there is to gain.
template <bool with_dy, bool past, class T>
INLINE void write_row(int64_t width, const T *x, const T *dy, const Coefficients &k, T *out) {
    int64_t c = 0;
    for (; c + LANES <= width; c += LANES) {
        const vec slope = load(k.slope + c), e = with_dy ? load(dy + c) : slope, scale = with_dy ? load(k.scale + c) : slope;
        const vec v = value<with_dy>(load(x + c), e, load(k.center + c), scale, slope, load(k.shift + c));
        past ? store_past(out + c, v) : store(out + c, v);
    }
    if (c < width) {
        const int64_t n = width - c;
        const vec slope = load_some(k.slope + c, n), e = with_dy ? load_some(dy + c, n) : slope;
        const vec scale = with_dy ? load_some(k.scale + c, n) : slope;
        const vec y = value<with_dy>(load_some(x + c, n), e, load_some(k.center + c, n), scale, slope,
                                     load_some(k.shift + c, n));
        store_some(out + c, y, n);
    }
}

template <bool with_dy, bool past, class T>
void write_values(const Block &b, const T *x, const T *dy, const Coefficients &k, T *out) {
    if (!b.channels_last) {
        for (int64_t c = 0; c < b.width; c++) {
            const int64_t at = c * b.space;
            write_channel<with_dy, past>(b, x + at, dy + at, k, c, out + at);
        }
        return;
    }
    for (int64_t row = 0; row < b.rows; row++, x += b.stride, dy += b.stride, out += b.stride)
        write_row<with_dy, past>(b.width, x, dy, k, out);
}

template <bool with_dy, class T>
void write_block(const Block &b, bool past, const T *x, const T *dy, const Coefficients &k, T *out) {
    x += b.start;
    dy += b.start;
    out += b.start;
    const uint64_t step = (b.channels_last ? b.stride : b.space) * sizeof(T);
    if (past && (uint64_t)out % LINE == 0 && step % LINE == 0) {
        write_values<with_dy, true>(b, x, dy, k, out);
        finish_stores();
    } else {
        write_values<with_dy, false>(b, x, dy, k, out);
    }
}

// From the last chunk to the first: the last ones are still in cache.
template <bool with_dy, class T>
void write(const Block &whole, const Plan &plan, const T *x, const T *dy, const Coefficients &k, T *out) {
    for (int64_t to = whole.steps(); to > 0; to -= plan.chunk)
        write_block<with_dy>(whole.part(most(0, to - plan.chunk), to), plan.past, x, dy, k, out);
}

// ---- from statistics to coefficients ----

INLINE void set_coefficients(const Coefficients &k, int64_t c, double mean, float rstd, const float *weight,
                             const float *bias) {
    k.center[c] = (float)mean;
    k.slope[c] = weight ? rstd * weight[c] : rstd;
    k.shift[c] = (float)((bias ? bias[c] : 0) + (k.center[c] - mean) * k.slope[c]);
}

// `weight`, `bias`, the statistics and the tables of the group begin at the first channel of the block.
INLINE void forward_coefficients(int64_t width, int64_t per, const double *mean, const double *variance, double eps,
                                 const float *weight, const float *bias, float *group_mean, float *group_rstd,
                                 const Coefficients &k) {
    if (per == 1) {
        for (int64_t c = 0; c < width; c++) {
            group_mean[c] = (float)mean[c];
            group_rstd[c] = (float)(1 / __builtin_sqrt(variance[c] + eps));
        }
        for (int64_t c = 0; c < width; c++) set_coefficients(k, c, mean[c], group_rstd[c], weight, bias);
        return;
    }
    for (int64_t g = 0; g < width / per; g++) {
        const double *m = mean + g * per, *v = variance + g * per;
        double of_group = 0, spread = 0;
        for (int64_t c = 0; c < per; c++) of_group += m[c];
        of_group /= per;
        for (int64_t c = 0; c < per; c++) spread += v[c] + (m[c] - of_group) * (m[c] - of_group);
        group_mean[g] = (float)of_group;
        group_rstd[g] = (float)(1 / __builtin_sqrt(spread / per + eps));
        for (int64_t c = g * per; c < (g + 1) * per; c++)
            set_coefficients(k, c, of_group, group_rstd[g], weight, bias);
    }
}

// One number for each channel group to one for each channel.
INLINE void spread(int64_t width, int64_t per, const float *of_groups, float *of_channels) {
    if (per == 1) __builtin_memcpy(of_channels, of_groups, width * sizeof(float));
    else
        for (int64_t g = 0; g < width / per; g++)
            for (int64_t c = 0; c < per; c++) of_channels[g * per + c] = of_groups[g];
}

// dx = dy * w r - r * mean(w dy) - r * xhat * mean(w dy xhat), where xhat = (x - mean) r. The mean is known as a float,
// group_mean; `offset`, the sum of x - group_mean, tells what is missing.
INLINE void backward_coefficients(int64_t width, int64_t per, double values, const float *weight, const float *mean,
                                  const float *rstd, double *sum, double *dot, const double *offset,
                                  const Coefficients &k) {
    if (per == 1) {
        const double share = 1 / values;
        for (int64_t c = 0; c < width; c++) {
            const double r = rstd[c], w = weight ? weight[c] : 1, found = offset[c] * share;
            const double off = found - found == 0 ? found : 0;
            dot[c] = (dot[c] - off * sum[c]) * r;
            const double slope = -w * dot[c] * share * r * r;
            k.center[c] = mean[c];
            k.scale[c] = (float)(w * r);
            k.slope[c] = (float)slope;
            k.shift[c] = (float)(-w * sum[c] * share * r - slope * off);
        }
        return;
    }
    for (int64_t g = 0; g < width / per; g++) {
        const double r = rstd[g], count = values * per;
        double off = 0, mean_dy = 0, mean_dot = 0;
        for (int64_t c = g * per; c < (g + 1) * per; c++) off += offset[c] / count;
        off = off - off == 0 ? off : 0;
        for (int64_t c = g * per; c < (g + 1) * per; c++) {
            const double w = weight ? weight[c] : 1;
            dot[c] = (dot[c] - off * sum[c]) * r;
            mean_dy += w * sum[c] / count;
            mean_dot += w * dot[c] / count;
            k.scale[c] = (float)(w * r);
        }
        for (int64_t c = g * per; c < (g + 1) * per; c++) {
            k.center[c] = mean[g];
            k.slope[c] = (float)(-mean_dot * r * r);
            k.shift[c] = (float)(-mean_dy * r + mean_dot * r * r * off);
        }
    }
}

// ---- training ----

#define EACH_UNIT(a)                                                                                                   \
    const Shape &s = a.shape;                                                                                          \
    const int64_t C = s.channels, per = s.channels_per_group, K = C / per;                                             \
    const Scratch scratch(a.plan.width);                                                                               \
    const Coefficients &k = scratch.k;                                                                                 \
    for (int64_t unit = begin; unit < end; unit++)                                                                     \
        for (int64_t group = unit / a.plan.across, c0 = unit % a.plan.across * a.plan.width, once = 1; once; once = 0)

template <class T> void forward(const Forward &a, int64_t begin, int64_t end) {
    const T *x = (const T *)a.x;
    EACH_UNIT(a) {
        const Block b = unit_block(s, group, c0, least(a.plan.width, C - c0));
        double *mean = a.mean + group * C + c0, *variance = a.variance + group * C + c0;
        const int64_t table = group * K + c0 / per;
        statistics(b, a.plan.chunk, x, scratch, mean, variance);
        forward_coefficients(b.width, per, mean, variance, a.eps, a.weight ? a.weight + c0 : nullptr,
                             a.bias ? a.bias + c0 : nullptr, a.group_mean + table, a.group_rstd + table, k);
        write<false>(b, a.plan, x, x, k, (T *)a.y);
    }
}

template <class T> void backward(const Backward &a, int64_t begin, int64_t end) {
    const T *x = (const T *)a.x, *dy = (const T *)a.dy;
    EACH_UNIT(a) {
        const Block b = unit_block(s, group, c0, least(a.plan.width, C - c0));
        double *const out[] = {a.sum + group * C + c0, a.dot + group * C + c0, scratch.c};
        const int64_t table = group * K + c0 / per;
        spread(b.width, per, a.group_mean + table, k.center);
        sums<PRODUCTS>(b, x, dy, k.center, scratch, out);
        backward_coefficients(b.width, per, (double)b.values(), a.weight ? a.weight + c0 : nullptr, a.group_mean + table,
                              a.group_rstd + table, out[0], out[1], out[2], k);
        if (a.dx) write<true>(b, a.plan, x, dy, k, (T *)a.dx);
    }
}

// ---- training, where the chunks of channels-last groups are worked on by themselves ----

INLINE Block slice_block(const Shape &s, const Plan &plan, int64_t index) {
    const Block whole = unit_block(s, index / plan.slices, 0, s.channels);
    const int64_t from = index % plan.slices * plan.chunk;
    return whole.part(least(from, whole.rows), least(from + plan.chunk, whole.rows));
}

template <class T> void forward_statistics(const Forward &a, int64_t begin, int64_t end) {
    const int64_t C = a.shape.channels;
    const Scratch scratch(C);
    for (int64_t i = begin; i < end; i++) {
        const Block b = slice_block(a.shape, a.plan, i);
        if (b.rows) statistics_of_chunk(b, (const T *)a.x, scratch, a.parts[0] + i * C, a.parts[1] + i * C);
    }
}

template <class T> void forward_join(const Forward &a, int64_t begin, int64_t end) {
    const Shape &s = a.shape;
    const int64_t C = s.channels, per = s.channels_per_group, K = C / per;
    for (int64_t group = begin; group < end; group++) {
        double *mean = a.mean + group * C, *variance = a.variance + group * C;
        for (int64_t i = group * a.plan.slices, seen = 0; i < (group + 1) * a.plan.slices; i++) {
            const int64_t rows = slice_block(s, a.plan, i).rows;
            if (!rows) break;
            seen += rows;
            if (seen == rows) {
                __builtin_memcpy(mean, a.parts[0] + i * C, C * sizeof(double));
                __builtin_memcpy(variance, a.parts[1] + i * C, C * sizeof(double));
            } else {
                join(C, (double)rows / seen, a.parts[0] + i * C, a.parts[1] + i * C, mean, variance);
            }
        }
        forward_coefficients(C, per, mean, variance, a.eps, a.weight, a.bias, a.group_mean + group * K,
                             a.group_rstd + group * K, a.coefficients.from(group * C));
    }
}

template <class T> void forward_write(const Forward &a, int64_t begin, int64_t end) {
    const T *x = (const T *)a.x;
    for (int64_t i = begin; i < end; i++)
        write_block<false>(slice_block(a.shape, a.plan, i), a.plan.past, x, x,
                           a.coefficients.from(i / a.plan.slices * a.shape.channels), (T *)a.y);
}

template <class T> void backward_sums(const Backward &a, int64_t begin, int64_t end) {
    const Shape &s = a.shape;
    const int64_t C = s.channels, per = s.channels_per_group, K = C / per;
    const Scratch scratch(C);
    for (int64_t i = begin; i < end; i++) {
        double *const out[] = {a.parts[0] + i * C, a.parts[1] + i * C, a.parts[2] + i * C};
        spread(C, per, a.group_mean + i / a.plan.slices * K, scratch.k.center);
        sums<PRODUCTS>(slice_block(s, a.plan, i), (const T *)a.x, (const T *)a.dy, scratch.k.center, scratch, out);
    }
}

template <class T> void backward_join(const Backward &a, int64_t begin, int64_t end) {
    const Shape &s = a.shape;
    const int64_t C = s.channels, per = s.channels_per_group, K = C / per;
    const Scratch scratch(C);
    for (int64_t group = begin; group < end; group++) {
        double *const out[] = {a.sum + group * C, a.dot + group * C, scratch.c};
        for (int j = 0; j < 3; j++)
            for (int64_t c = 0; c < C; c++) out[j][c] = 0;
        for (int64_t i = group * a.plan.slices; i < (group + 1) * a.plan.slices; i++)
            for (int j = 0; j < 3; j++)
                for (int64_t c = 0; c < C; c++) out[j][c] += a.parts[j][i * C + c];
        backward_coefficients(C, per, (double)unit_block(s, group, 0, C).rows, a.weight, a.group_mean + group * K,
                              a.group_rstd + group * K, out[0], out[1], out[2], a.coefficients.from(group * C));
    }
}

template <class T> void backward_write(const Backward &a, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
        write_block<true>(slice_block(a.shape, a.plan, i), a.plan.past, (const T *)a.x, (const T *)a.dy,
                          a.coefficients.from(i / a.plan.slices * a.shape.channels), (T *)a.dx);
}

// ---- inference: the example's own moments have weight alpha, the moving averages the rest ----

// Parameters of a block of channels.
struct Weighed {
    const float *M, *V, *weight, *bias, *alpha;
    int64_t step;

    Weighed(const Infer &a, int64_t c0)
        : M(a.running_mean + c0), V(a.running_var + c0), weight(a.weight ? a.weight + c0 : nullptr),
          bias(a.bias ? a.bias + c0 : nullptr), alpha(a.alpha + c0 * a.alpha_step), step(a.alpha_step) {}

    double own(int64_t c) const { return alpha[c * step]; }
    double mixed(int64_t c, const double *m) const { return (1 - own(c)) * M[c] + own(c) * m[c]; }
    // Of the channels from g on that are a group, given the mean and variance of each over the example.
    void group(int64_t g, int64_t per, const double *m, const double *v, double eps, double &mean, double &rstd) const {
        double variance = 0;
        mean = 0;
        for (int64_t c = g; c < g + per; c++) mean += mixed(c, m);
        mean /= per;
        for (int64_t c = g; c < g + per; c++) {
            const double a = own(c), mine = m[c] - mean, moving = M[c] - mean;
            variance += (1 - a) * (V[c] + moving * moving) + a * (v[c] + mine * mine);
        }
        rstd = 1 / __builtin_sqrt(variance / per + eps);
    }
};

template <class T> void infer(const Infer &a, int64_t begin, int64_t end) {
    const T *x = (const T *)a.x;
    EACH_UNIT(a) {
        (void)K;
        const Block b = unit_block(s, group, c0, least(a.plan.width, C - c0));
        const Weighed p(a, c0);
        double *m = scratch.c, *v = scratch.d, mean, rstd;
        __builtin_memcpy(k.center, p.M, b.width * sizeof(float));  // the moving average is a good guess of the mean
        statistics_near(b, x, k.center, scratch, m, v);
        for (int64_t g = 0; g < b.width; g += per) {
            p.group(g, per, m, v, a.eps, mean, rstd);
            for (int64_t c = g; c < g + per; c++) set_coefficients(k, c, mean, (float)rstd, p.weight, p.bias);
        }
        write<false>(b, a.plan, x, x, k, (T *)a.y);
    }
}

// The statistics are computed again. With mu and s the mixed mean and variance of a group of channels, and r = 1 / sqrt(s + eps),
//   dL/dmu = -r sum(w dy),  dL/ds = -r^2 / 2 sum(w dy xhat),
// over the group. From there on by channel, with a = alpha, m and v the example's moments and M and V the moving ones:
//   dL/dm = a (dL/dmu + 2 dL/ds (m - mu)),  dL/dv = a dL/ds,
//   dL/da = dL/dmu (m - M) + dL/ds (v + (m - mu)^2 - V - (M - mu)^2),  all divided by the channels of the group.
template <class T> void infer_backward(const InferBackward &a, int64_t begin, int64_t end) {
    const T *x = (const T *)a.x, *dy = (const T *)a.dy;
    EACH_UNIT(a) {
        (void)K;
        const Block b = unit_block(s, group, c0, least(a.plan.width, C - c0));
        const Weighed p(a, c0);
        const int64_t row = group * C + c0;
        double *const m = scratch.c, *const v = scratch.d, *const sum = a.sum + row, *const dot = a.dot + row;
        double *const out[] = {sum, dot, m, v}, share = 1 / (double)b.values();
        const auto moments = [&](const float *guess) {
            bool near = true;
            sums<BOTH>(b, x, dy, guess, scratch, out);
            for (int64_t c = 0; c < b.width; c++) {
                const double off = m[c] * share, variance = v[c] * share - off * off;
                m[c] = guess[c] + off;
                v[c] = variance < 0 ? 0 : variance;
                near &= is_near(guess[c], m[c], v[c]);
            }
            return near;
        };
        __builtin_memcpy(k.center, p.M, b.width * sizeof(float));
        if (!moments(k.center)) {
            for (int64_t c = 0; c < b.width; c++) k.center[c] = (float)m[c];
            moments(k.center);
        }
        for (int64_t g = 0; g < b.width; g += per) {
            double mean, r, of_mean = 0, of_variance = 0;
            p.group(g, per, m, v, a.eps, mean, r);
            for (int64_t c = g; c < g + per; c++) {
                const double w = p.weight ? p.weight[c] : 1;
                dot[c] = (dot[c] + (k.center[c] - mean) * sum[c]) * r;
                of_mean -= w * r * sum[c] / per;
                of_variance -= w * r * r * dot[c] / (2 * per);
            }
            for (int64_t c = g; c < g + per; c++) {
                const double own = m[c] - mean, moving = p.M[c] - mean, alpha = p.own(c);
                a.dalpha[row + c] = of_mean * (m[c] - p.M[c]) + of_variance * (v[c] + own * own - p.V[c] - moving * moving);
                const double slope = 2 * alpha * of_variance * share;
                const double constant = alpha * (of_mean + 2 * of_variance * own) * share;
                k.scale[c] = (float)(p.weight ? p.weight[c] * r : r);
                k.slope[c] = (float)slope;
                k.shift[c] = (float)(constant + slope * (k.center[c] - m[c]));
            }
        }
        if (a.dx) write<true>(b, a.plan, x, dy, k, (T *)a.dx);
    }
}

}  // namespace

#define KERNELS(T)                                                                                                     \
    {forward<T>,       forward_statistics<T>, forward_join<T>,   forward_write<T>, backward<T>,                        \
     backward_sums<T>, backward_join<T>,      backward_write<T>, infer<T>,  infer_backward<T>}

extern const Kernels BETTERNORM_TABLE[TYPES] = {KERNELS(float), KERNELS(bfloat16), KERNELS(float16)};

}  // namespace betternorm

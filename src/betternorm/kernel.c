/* Grouped batch normalisation on the CPU, one trip through memory for each group.

   A group is a run of consecutive examples times a run of consecutive channels times space. Its values are summed,
   centred and written while they are in cache, which torch's own kernels do not do. kernel.py compiles and calls this
   file; functional.py has the same mathematics in readable form and is its oracle in the tests.

   Layouts: contiguous, (N, C, S), or channels last, (N, S, C), where S is the product of the spatial sizes.
   A lane sums at most STRETCH values in float before they are added up in double, and every mean is corrected by the
   mean of the residuals, so that a large mean costs no digits. */

#include <math.h>
#include <string.h>

#define LANES 16
#define STRETCH 256
#define WIDEST 128         /* channels last: how much of a row is read at once, where that leaves work for all threads */
#define BLOCK 256          /* channels of a table added up at a time */
#define SERIAL_BELOW 32768 /* values below which threads cost more than they bring, as in ATen */

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef float vec8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));

typedef struct {
    long examples, channels, space;
    long groups; /* of examples: the first `examples % groups` have one example more than the others */
    long channels_per_group;
    long channels_last;
    long threads;
} Shape;

/* A unit of work: examples n0 to n1 of `width` channels from c0 on; whole channel groups. */
typedef struct {
    long n0, n1, c0, width;
} Unit;

#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE vec splat(float f) { return f - (vec){0}; }
INLINE float total(vec v) {
    const vec8 *halves = (const vec8 *)&v;
    const vec8 a = halves[0] + halves[1];
    const vec4 *quarters = (const vec4 *)&a;
    const vec4 b = quarters[0] + quarters[1];
    return (b[0] + b[1]) + (b[2] + b[3]);
}

static long group_start(const Shape *s, long group) {
    const long size = s->examples / s->groups, larger = s->examples % s->groups;
    return group * size + (group < larger ? group : larger);
}

static long unit_width(const Shape *s) {
    long width = LANES;
    if (s->channels_last) {
        width = WIDEST;
        while (width > LANES && s->groups * ((s->channels + width - 1) / width) < s->threads) width /= 2;
    } else if (s->space * s->channels_per_group > STRETCH) {
        width = 1;
    }
    width = (width + s->channels_per_group - 1) / s->channels_per_group * s->channels_per_group;
    return width < s->channels ? width : s->channels;
}

/* ---- two sums a channel over the values of a unit ----

   TERM turns a value of x (and of dy) into the two numbers that are summed. All four bodies below are the same for
   every term; the compiler makes a copy of them for each. */

typedef enum { SUM, MOMENTS, PRODUCTS } Term;
/* SUM: x and nothing. MOMENTS: x - centre and its square. PRODUCTS: dy and dy * (x - centre). */

#define TERM(first, second, x, dy, centre)                                                                             \
    if (term == SUM) { first += x; }                                                                                   \
    else if (term == MOMENTS) { __typeof__(x) d = x - centre; first += d; second += d * d; }                           \
    else { __typeof__(x) e = dy; first += e; second += e * (x - centre); }

INLINE void sums_of_channel(const Term term, long S, long runs, long stride, const float *x, const float *dy,
                            float centre, double *first, double *second) {
    const vec m = splat(centre);
    double all = 0, all2 = 0;
    vec a = {0}, b = {0}, a2 = {0}, b2 = {0};
    long covered = 0;
    for (long n = 0; n < runs; n++, x += stride, dy += stride) {
        long i = 0;
        while (i + LANES <= S) {
            const long stop = S - i > STRETCH * LANES ? i + STRETCH * LANES : S;
            covered += stop - i;
            for (; i + 2 * LANES <= stop; i += 2 * LANES) {
                TERM(a, a2, load(x + i), load(dy + i), m)
                TERM(b, b2, load(x + i + LANES), load(dy + i + LANES), m)
            }
            if (i + LANES <= stop) {
                TERM(a, a2, load(x + i), load(dy + i), m)
                i += LANES;
            }
            if (covered >= STRETCH * LANES) {
                all += total(a + b);
                all2 += total(a2 + b2);
                a = b = a2 = b2 = (vec){0};
                covered = 0;
            }
        }
        for (; i < S; i++) { TERM(all, all2, (double)x[i], (double)dy[i], centre) }
    }
    *first = all + total(a + b);
    *second = all2 + total(a2 + b2);
}

/* Channels last: `vectors` times LANES channels at once, or `width` of them, fewer than LANES. LINES rows at once make
   sums enough to hide the time that an addition takes. Their number and order is the same for every channel, so that a
   result does not depend on how the work was divided. */
#define LINES 2

INLINE vec load_some(const float *p, long width) {
    vec v = {0};
    memcpy(&v, p, width * sizeof *p);
    return v;
}

INLINE void sums_of_rows(const Term term, const int vectors, long width, long rows, long stride, const float *x,
                         const float *dy, const float *centre, double *first, double *second) {
#define GET(p, k) (vectors ? load((p) + (k) * LANES) : load_some(p, width))
    const int count = vectors ? vectors : 1;
    vec m[count];
    for (int k = 0; k < count; k++) m[k] = GET(centre, k);
    for (long row = 0; row < rows;) {
        const long stop = rows - row > LINES * STRETCH ? row + LINES * STRETCH : rows;
        vec a[LINES][count], a2[LINES][count];
        for (int j = 0; j < LINES; j++)
            for (int k = 0; k < count; k++) a[j][k] = a2[j][k] = (vec){0};
        for (; row + LINES <= stop; row += LINES, x += LINES * stride, dy += LINES * stride)
            for (int j = 0; j < LINES; j++)
                for (int k = 0; k < count; k++) {
                    TERM(a[j][k], a2[j][k], GET(x + j * stride, k), GET(dy + j * stride, k), m[k])
                }
        for (; row < stop; row++, x += stride, dy += stride)
            for (int k = 0; k < count; k++) { TERM(a[0][k], a2[0][k], GET(x, k), GET(dy, k), m[k]) }
        for (int j = 0; j < LINES; j++)
            for (int k = 0; k < count; k++)
                for (int i = 0; i < (vectors ? LANES : width); i++) {
                    first[k * LANES + i] += a[j][k][i];
                    second[k * LANES + i] += a2[j][k][i];
                }
    }
#undef GET
}

INLINE void sums(const Term term, const Shape *s, Unit u, const float *x, const float *dy, const float *centre,
                 double *first, double *second) {
    const long C = s->channels, S = s->space;
    if (!s->channels_last) {
        for (long c = 0; c < u.width; c++) {
            const long at = (u.n0 * C + u.c0 + c) * S;
            sums_of_channel(term, S, u.n1 - u.n0, C * S, x + at, dy + at, centre[c], first + c, second + c);
        }
        return;
    }
    const long rows = (u.n1 - u.n0) * S;
    memset(first, 0, u.width * sizeof *first);
    memset(second, 0, u.width * sizeof *second);
    x += u.n0 * S * C + u.c0;
    dy += u.n0 * S * C + u.c0;
    long c = 0;
    for (; c + 4 * LANES <= u.width; c += 4 * LANES)
        sums_of_rows(term, 4, 0, rows, C, x + c, dy + c, centre + c, first + c, second + c);
    for (; c + LANES <= u.width; c += LANES)
        sums_of_rows(term, 1, 0, rows, C, x + c, dy + c, centre + c, first + c, second + c);
    if (c < u.width)
        sums_of_rows(term, 0, u.width - c, rows, C, x + c, dy + c, centre + c, first + c, second + c);
}

/* Mean and biased variance of every channel of a unit, from sums about `centre`. Returns whether that was near enough
   to the mean for the variance to be exact: what is subtracted is then at most 16 times what remains. */
static int about(const Shape *s, Unit u, const float *x, const float *centre, double *mean, double *variance) {
    const double count = (double)(u.n1 - u.n0) * s->space;
    int near = 1;
    sums(MOMENTS, s, u, x, x, centre, mean, variance);
    for (long c = 0; c < u.width; c++) {
        const double off = mean[c] / count, v = variance[c] / count - off * off;
        near &= off * off <= 16 * v;
        mean[c] = isfinite(off) ? centre[c] + off : centre[c]; /* else it is infinite or NaN already, and stays so */
        variance[c] = v < 0 ? 0 : v;                           /* in this order NaN stays NaN */
    }
    return near;
}

/* The same without a centre to begin with. A good guess, if there is one, saves reading the values twice. */
static void channel_statistics(const Shape *s, Unit u, const float *x, const float *guess, double *mean,
                               double *variance) {
    float centre[u.width];
    if (guess && about(s, u, x, guess, mean, variance)) return;
    memset(centre, 0, sizeof centre);
    sums(SUM, s, u, x, x, centre, mean, variance);
    for (long c = 0; c < u.width; c++) centre[c] = (float)(mean[c] / ((double)(u.n1 - u.n0) * s->space));
    about(s, u, x, centre, mean, variance);
}

/* ---- one value out for every value of a unit ---- */

/* out = dy * scale + (x - centre) * slope + shift, or without dy where it is NULL */
typedef struct {
    const float *centre, *scale, *slope, *shift;
} Coefficients;

INLINE void write_run(const int with_dy, long count, const float *restrict x, const float *restrict dy, float centre,
                      float scale, float slope, float shift, float *restrict out) {
    for (long i = 0; i < count; i++) {
        const float own = (x[i] - centre) * slope + shift;
        out[i] = with_dy ? dy[i] * scale + own : own;
    }
}

/* Channels last: `vectors` times LANES channels, whose coefficients stay in registers, or `width` of them. */
INLINE void write_rows(const int with_dy, const int vectors, long width, long rows, long stride, const float *x,
                       const float *dy, Coefficients k, float *out) {
    if (!vectors) {
        for (long row = 0; row < rows; row++, x += stride, dy += stride, out += stride)
            for (long c = 0; c < width; c++)
                write_run(with_dy, 1, x + c, dy + c, k.centre[c], k.scale[c], k.slope[c], k.shift[c], out + c);
        return;
    }
    vec centre[vectors], scale[vectors], slope[vectors], shift[vectors];
    for (int v = 0; v < vectors; v++) {
        centre[v] = load(k.centre + v * LANES);
        scale[v] = load(k.scale + v * LANES);
        slope[v] = load(k.slope + v * LANES);
        shift[v] = load(k.shift + v * LANES);
    }
    for (long row = 0; row < rows; row++, x += stride, dy += stride, out += stride)
        for (int v = 0; v < vectors; v++) {
            vec value = (load(x + v * LANES) - centre[v]) * slope[v] + shift[v];
            if (with_dy) value += load(dy + v * LANES) * scale[v];
            *(vec *)(out + v * LANES) = value;
        }
}

INLINE void write_values(const int with_dy, const Shape *s, Unit u, const float *x, const float *dy, Coefficients k,
                         float *out) {
    const long C = s->channels, S = s->space;
    if (!s->channels_last) {
        for (long n = u.n0; n < u.n1; n++)
            for (long c = 0; c < u.width; c++) {
                const long at = (n * C + u.c0 + c) * S;
                write_run(with_dy, S, x + at, dy + at, k.centre[c], k.scale[c], k.slope[c], k.shift[c], out + at);
            }
        return;
    }
    const long rows = (u.n1 - u.n0) * S, start = u.n0 * S * C + u.c0;
    for (long c = 0; c < u.width;) {
        const Coefficients here = {k.centre + c, k.scale + c, k.slope + c, k.shift + c};
        const long at = start + c, left = u.width - c;
        if (left >= 4 * LANES) {
            write_rows(with_dy, 4, 0, rows, C, x + at, dy + at, here, out + at);
            c += 4 * LANES;
        } else if (left >= LANES) {
            write_rows(with_dy, 1, 0, rows, C, x + at, dy + at, here, out + at);
            c += LANES;
        } else {
            write_rows(with_dy, 0, left, rows, C, x + at, dy + at, here, out + at);
            c = u.width;
        }
    }
}

static void write_unit(const Shape *s, Unit u, const float *x, const float *dy, Coefficients k, float *out) {
    if (dy) write_values(1, s, u, x, dy, k, out);
    else write_values(0, s, u, x, x, k, out);
}

/* ---- from tables of (groups, channels) to one number a channel ---- */

/* Mean and biased variance over the whole batch. */
static void batch_statistics(const Shape *s, const double *mean, const double *variance, float *batch_mean,
                             float *batch_variance) {
    const long C = s->channels;
    for (long c0 = 0; c0 < C; c0 += BLOCK) {
        const long width = C - c0 < BLOCK ? C - c0 : BLOCK;
        double m[BLOCK] = {0}, v[BLOCK] = {0};
        for (long pass = 0; pass < 2; pass++)
            for (long group = 0; group < s->groups; group++) {
                const double share = (double)(group_start(s, group + 1) - group_start(s, group)) / s->examples;
                const double *gm = mean + group * C + c0, *gv = variance + group * C + c0;
                for (long c = 0; c < width; c++) {
                    if (pass == 0) m[c] += share * gm[c];
                    else v[c] += share * (gv[c] + (gm[c] - m[c]) * (gm[c] - m[c]));
                }
            }
        for (long c = 0; c < width; c++) {
            batch_mean[c0 + c] = (float)m[c];
            batch_variance[c0 + c] = (float)v[c];
        }
    }
}

static void add_groups(const Shape *s, const double *table, float *out) {
    const long C = s->channels;
    for (long c0 = 0; c0 < C; c0 += BLOCK) {
        const long width = C - c0 < BLOCK ? C - c0 : BLOCK;
        double sum[BLOCK] = {0};
        for (long group = 0; group < s->groups; group++)
            for (long c = 0; c < width; c++) sum[c] += table[group * C + c0 + c];
        for (long c = 0; c < width; c++) out[c0 + c] = (float)sum[c];
    }
}

/* ---- entry points ---- */

#define EACH_UNIT(s, group, u)                                                                                         \
    const long step = unit_width(&s), across = (s.channels + step - 1) / step, units = s.groups * across;              \
    const int threads = s.examples * s.channels * s.space < SERIAL_BELOW ? 1 : (int)s.threads;                         \
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")                                 \
    for (long index = 0; index < units; index++)                                                                       \
        for (long group = index / across, c0 = index % across * step, once = 1; once; once = 0)                        \
            for (Unit u = {group_start(&s, group), group_start(&s, group + 1), c0,                                     \
                           s.channels - c0 < step ? s.channels - c0 : step}; once; once = 0)

/* Training. group_mean and group_rstd, (groups, channels / channels_per_group), are for the backward pass;
   batch_mean and batch_variance, (channels), for the moving averages. y may be NULL: statistics only.
   `scratch` has room for 2 * groups * channels. */
void forward(Shape s, const float *x, const float *weight, const float *bias, double eps, float *y,
             float *group_mean, float *group_rstd, float *batch_mean, float *batch_variance, double *scratch) {
    double *channel_mean = scratch, *channel_variance = scratch + s.groups * s.channels;
    const long per = s.channels_per_group, across_groups = s.channels / per;
    EACH_UNIT(s, group, u) {
        double *m = channel_mean + group * s.channels + u.c0, *v = channel_variance + group * s.channels + u.c0;
        float centre[u.width], slope[u.width], shift[u.width];
        channel_statistics(&s, u, x, NULL, m, v);
        for (long k = 0; k < u.width; k += per) {
            double mean = 0, variance = 0;
            for (long c = k; c < k + per; c++) mean += m[c];
            mean /= per;
            for (long c = k; c < k + per; c++) variance += v[c] + (m[c] - mean) * (m[c] - mean);
            const float rstd = (float)(1 / sqrt(variance / per + eps));
            group_mean[group * across_groups + (u.c0 + k) / per] = (float)mean;
            group_rstd[group * across_groups + (u.c0 + k) / per] = rstd;
            for (long c = k; c < k + per; c++) {
                centre[c] = (float)mean;
                slope[c] = weight ? rstd * weight[u.c0 + c] : rstd;
                shift[c] = (float)((bias ? bias[u.c0 + c] : 0) + (centre[c] - mean) * slope[c]);
            }
        }
        if (y) write_unit(&s, u, x, NULL, (Coefficients){centre, slope, slope, shift}, y);
    }
    batch_statistics(&s, channel_mean, channel_variance, batch_mean, batch_variance);
}

/* Gradients. dx may be NULL where nobody asks for it. `scratch` has room for 2 * groups * channels. */
void backward(Shape s, const float *dy, const float *x, const float *weight, const float *group_mean,
              const float *group_rstd, float *dx, float *dweight, float *dbias, double *scratch) {
    const long per = s.channels_per_group, across_groups = s.channels / per;
    double *sum_dy = scratch, *sum_dy_xhat = scratch + s.groups * s.channels;
    EACH_UNIT(s, group, u) {
        const double count = (double)(u.n1 - u.n0) * s.space * per;
        const float *mean = group_mean + group * across_groups, *rstd = group_rstd + group * across_groups;
        double sum[u.width], dot[u.width];
        float centre[u.width], scale[u.width], slope[u.width], shift[u.width];
        for (long c = 0; c < u.width; c++) centre[c] = mean[(u.c0 + c) / per];
        sums(PRODUCTS, &s, u, x, dy, centre, sum, dot);
        for (long k = 0; k < u.width; k += per) {
            const double r = rstd[(u.c0 + k) / per];
            double mean_dy = 0, mean_dot = 0;
            for (long c = k; c < k + per; c++) {
                const double w = weight ? weight[u.c0 + c] : 1;
                mean_dy += w * sum[c] / count;
                mean_dot += w * dot[c] / count;
                scale[c] = (float)(w * r);
                sum_dy[group * s.channels + u.c0 + c] = sum[c];
                sum_dy_xhat[group * s.channels + u.c0 + c] = dot[c] * r;
            }
            for (long c = k; c < k + per; c++) {
                slope[c] = (float)(-mean_dot * r * r * r);
                shift[c] = (float)(-mean_dy * r);
            }
        }
        if (dx) write_unit(&s, u, x, dy, (Coefficients){centre, scale, slope, shift}, dx);
    }
    add_groups(&s, sum_dy, dbias);
    add_groups(&s, sum_dy_xhat, dweight);
}

/* Inference: the example's own moments have weight alpha, the moving averages the rest. One group an example. */
void infer(Shape s, const float *x, const float *running_mean, const float *running_var, const float *weight,
           const float *bias, double alpha, double eps, float *y) {
    const long per = s.channels_per_group;
    EACH_UNIT(s, group, u) {
        const float *moving_mean = running_mean + u.c0, *moving_var = running_var + u.c0;
        double m[u.width], v[u.width];
        float centre[u.width], slope[u.width], shift[u.width];
        channel_statistics(&s, u, x, moving_mean, m, v);
        for (long k = 0; k < u.width; k += per) {
            double mean = 0, variance = 0;
            for (long c = k; c < k + per; c++) mean += (1 - alpha) * moving_mean[c] + alpha * m[c];
            mean /= per;
            for (long c = k; c < k + per; c++) {
                const double own = m[c] - mean, moving = moving_mean[c] - mean;
                variance += (1 - alpha) * (moving_var[c] + moving * moving) + alpha * (v[c] + own * own);
            }
            const float rstd = (float)(1 / sqrt(variance / per + eps));
            for (long c = k; c < k + per; c++) {
                centre[c] = (float)mean;
                slope[c] = weight ? rstd * weight[u.c0 + c] : rstd;
                shift[c] = (float)((bias ? bias[u.c0 + c] : 0) + (centre[c] - mean) * slope[c]);
            }
        }
        write_unit(&s, u, x, NULL, (Coefficients){centre, slope, slope, shift}, y);
    }
}

/* Mean and biased variance over space of every example and channel, given a guess of the mean of every channel. One
   group an example. */
void example_moments(Shape s, const float *x, const float *guess, float *mean, float *variance) {
    EACH_UNIT(s, group, u) {
        double m[u.width], v[u.width];
        channel_statistics(&s, u, x, guess + u.c0, m, v);
        for (long c = 0; c < u.width; c++) {
            mean[group * s.channels + u.c0 + c] = (float)m[c];
            variance[group * s.channels + u.c0 + c] = (float)v[c];
        }
    }
}

/* Moving averages of x and x^2, kept as mean and variance. Written so that infinity stays infinity. */
void move(long channels, float *running_mean, float *running_var, const float *mean, const float *variance,
          double momentum) {
    const float t = (float)momentum, rest = (float)(1 - momentum);
    for (long c = 0; c < channels; c++) {
        const float step = mean[c] - running_mean[c];
        running_var[c] = rest * running_var[c] + t * variance[c] + t * rest * step * step;
        running_mean[c] = rest * running_mean[c] + t * mean[c];
    }
}

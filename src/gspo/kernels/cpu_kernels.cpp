// Float32 attention, linear layers of small batches and log-probs on a CPU.
//
// Every product is built from one tile of a matrix product whose sums stay in registers. Vectors are the compiler's
// vector extension, so the same source compiles for every processor. A row of a result depends neither on the rows
// beside it nor on the number of threads.

#include <cmath>
#include <cstring>
#include <vector>

namespace {

constexpr long LANES = 16;
typedef float vec __attribute__((vector_size(64)));
typedef int ivec __attribute__((vector_size(64)));
typedef float loose __attribute__((vector_size(64), aligned(4), may_alias));

#ifdef __AVX512F__
constexpr int ROWS = 6, WIDE = 4, HIGH = 16;  // sizes of a tile: at most 24 of 32 registers hold sums
typedef vec reg;
typedef loose loose_reg;
#else
constexpr int ROWS = 6, WIDE = 1, HIGH = 6;  // 12 of 16 registers hold sums
typedef float reg __attribute__((vector_size(32)));  // a wider one than the processor has would live in memory
typedef float loose_reg __attribute__((vector_size(32), aligned(4), may_alias));
#endif
constexpr int REG = sizeof(reg) / sizeof(float), PARTS = LANES / REG;  // numbers in a register, registers in a vec
constexpr long BLOCK = 48;  // queries whose scores are in memory at a time, at most

#define UNROLL _Pragma("GCC unroll 16")

inline vec load(const float* p) { return *(const loose*)p; }
inline void store(float* p, vec x) { *(loose*)p = x; }
inline vec broadcast(float x) { return vec{} + x; }
inline long up(long n) { return (n + LANES - 1) / LANES * LANES; }

template <int... I>
inline vec mix(vec a, vec b) {
    return __builtin_shuffle(a, b, ivec{I...});
}

// Lanes exchanged at a distance of `step`: reductions always add in the same order.
inline vec swap_lanes(vec x, int step) {
    switch (step) {
        case 8: return mix<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(x, x);
        case 4: return mix<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11>(x, x);
        case 2: return mix<2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13>(x, x);
        default: return mix<1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14>(x, x);
    }
}

inline float sum(vec x) {
    UNROLL for (int step = 8; step; step /= 2) x += swap_lanes(x, step);
    return x[0];
}

inline float max_lane(vec x) {
    UNROLL for (int step = 8; step; step /= 2) {
        const vec other = swap_lanes(x, step);
        x = other > x ? other : x;
    }
    return x[0];
}

// exp(x) for x <= 0 to about an ulp, by the polynomial of Cephes' expf; 0 below -87.
inline vec exponential(vec x) {
    const vec kept = x < broadcast(-87.0f) ? broadcast(-87.0f) : x;
    const vec shifted = kept * 1.44269504088896341f + 12582912.0f;  // 1.5 · 2²³: rounds to a whole number
    const vec whole = shifted - 12582912.0f;
    const vec r = kept - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const vec power = (vec)(((ivec)shifted << 23) + (ivec)broadcast(1.0f));
    return x < broadcast(-87.0f) ? vec{} : p * power;
}

// c[m][0 … 16·N) (+)= Σ_k a[m·am + k·ak] · b[k·ldb + 0 … 16·N)
template <int M, int N>
inline void tile(long depth, const float* a, long am, long ak, const float* b, long ldb, float* c, long ldc, bool add) {
    constexpr int W = N * PARTS;
    reg sums[M][W];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int n = 0; n < W; n++) sums[m][n] = add ? *(const loose_reg*)(c + m * ldc + n * REG) : reg{};
    for (long k = 0; k < depth; k++) {
        reg row[W];
        UNROLL for (int n = 0; n < W; n++) row[n] = *(const loose_reg*)(b + k * ldb + n * REG);
        UNROLL for (int m = 0; m < M; m++) {
            const reg x = reg{} + a[m * am + k * ak];
            UNROLL for (int n = 0; n < W; n++) sums[m][n] += x * row[n];
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int n = 0; n < W; n++) *(loose_reg*)(c + m * ldc + n * REG) = sums[m][n];
}

template <int N, int M>
inline void strip(long rows, long depth, const float* a, long am, long ak, const float* b, long ldb, float* c, long ldc,
                  bool add) {
    for (; rows >= M; rows -= M, a += M * am, c += M * ldc) tile<M, N>(depth, a, am, ak, b, ldb, c, ldc, add);
    if constexpr (M > 1)
        if (rows) strip<N, M - 1>(rows, depth, a, am, ak, b, ldb, c, ldc, add);
}

// c [rows, columns] (+)= a [rows, depth] · b [depth, columns], a of any strides; columns a multiple of 16.
void multiply(long rows, long columns, long depth, const float* a, long am, long ak, const float* b, long ldb, float* c,
              long ldc, bool add) {
    long at = 0;
    for (; at + WIDE * LANES <= columns; at += WIDE * LANES)
        strip<WIDE, ROWS>(rows, depth, a, am, ak, b + at, ldb, c + at, ldc, add);
    const long left = (columns - at) / LANES;
    if (left == 3) strip<3, 8>(rows, depth, a, am, ak, b + at, ldb, c + at, ldc, add);
    if (left == 2) strip<2, 12>(rows, depth, a, am, ak, b + at, ldb, c + at, ldc, add);
    if (left == 1) strip<1, HIGH>(rows, depth, a, am, ak, b + at, ldb, c + at, ldc, add);
}

// Transposes 16 × 16 numbers: rows i and i + 8 are interleaved, four times.
inline void transpose_tile(const float* from, long ldf, float* to, long ldt) {
    vec x[16], y[16];
    UNROLL for (int i = 0; i < 16; i++) x[i] = load(from + i * ldf);
    UNROLL for (int round = 0; round < 4; round++) {
        UNROLL for (int i = 0; i < 8; i++) {
            y[2 * i] = mix<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(x[i], x[i + 8]);
            y[2 * i + 1] = mix<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(x[i], x[i + 8]);
        }
        UNROLL for (int i = 0; i < 16; i++) x[i] = y[i];
    }
    UNROLL for (int i = 0; i < 16; i++) store(to + i * ldt, x[i]);
}

// to [size, up(num)] = from [num, size] transposed, zero beyond num.
void transpose(const float* from, long ldf, long num, long size, float* to) {
    const long ldt = up(num), whole = num / LANES * LANES;
    for (long i = 0; i < whole; i += LANES)
        for (long d = 0; d + LANES <= size; d += LANES) transpose_tile(from + i * ldf + d, ldf, to + d * ldt + i, ldt);
    for (long d = size / LANES * LANES; d < size; d++)
        for (long i = 0; i < whole; i++) to[d * ldt + i] = from[i * ldf + d];
    for (long d = 0; d < size && whole < num; d++)
        for (long i = whole; i < ldt; i++) to[d * ldt + i] = i < num ? from[i * ldf + d] : 0.0f;
}

// Sets scores outside [first, last) to -inf; `width` is a multiple of 16.
inline void mask_outside(float* scores, long first, long last, long width) {
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vec never = broadcast(-INFINITY);
    for (long i = 0; i < first; i += LANES)
        store(scores + i, lane + (int)i < (int)first ? never : load(scores + i));
    for (long i = last / LANES * LANES; i < width; i += LANES)
        store(scores + i, lane + (int)i >= (int)last ? never : load(scores + i));
}

// x = exp(scale · (x - max)) over `width` columns; `total` is the sum, `top` the highest scaled score.
inline void softmax_row(float* x, long width, float scale, float* total, float* top) {
    vec most = load(x);
    for (long i = LANES; i < width; i += LANES) {
        const vec here = load(x + i);
        most = here > most ? here : most;
    }
    const float shift = max_lane(most) * scale;
    vec sums{};
    for (long i = 0; i < width; i += LANES) {
        const vec weights = exponential(load(x + i) * scale - shift);
        sums += weights;
        store(x + i, weights);
    }
    *total = sum(sums);
    *top = shift;
}

inline void prefetch(const float* from, long num) {
    for (long i = 0; i < num; i += LANES) __builtin_prefetch(from + i, 0, 2);
}

float* scratch(std::vector<float>& memory, long size) {
    if ((long)memory.size() < size) memory.resize(size);
    return memory.data();
}

thread_local std::vector<float> memories[8];

// A sequence of a packed row: start and length of its own tokens and of the prefix that it continues.
struct Sequence {
    long start, length, prefix, prefix_length;
};
// Consecutive sequences that continue the same prefix. `extra` is, in a packed row, where their sums of the prefix's
// gradients are stored; in a decode step, the number of tokens of the prefix.
struct Chunk {
    long first, count, extra;
};

struct Shape {
    long heads, key_heads, size, window;
    float scale;
    long shared() const { return heads / key_heads; }
};

// The first key that the query at `place` of a sequence sees.
inline long first_seen(const Shape& s, long place) { return s.window && place >= s.window ? place - s.window + 1 : 0; }

// How many queries of a sequence are processed at a time: about equal blocks.
inline long block_of(long length) {
    const long times = (length + BLOCK - 1) / BLOCK, rows = (length + times - 1) / times;
    return (rows + ROWS - 1) / ROWS * ROWS;
}

inline long clamp(long x, long most) { return x < 0 ? 0 : x > most ? most : x; }

// Masks the scores that query `row` does not see: `before` columns of the prefix, then `own` of the sequence itself.
inline void mask_unseen(const Shape& s, const Sequence& q, long row, float* scores, long before, long own) {
    const long first = first_seen(s, q.prefix_length + row);
    mask_outside(scores, clamp(first, q.prefix_length), q.prefix_length, before);
    mask_outside(scores + before, clamp(first - q.prefix_length, own), row + 1, own);
}

// `tile` over M consecutive rows of weights; the rows after them are prefetched meanwhile.
template <int M, int N>
inline void stream(long depth, const float* w, const float* transposed, float* c) {
    constexpr int W = N * PARTS;
    reg sums[M][W] = {};
    const float* ahead = w + M * depth;
    for (long k = 0; k < depth; k++) {
        reg row[W];
        __builtin_prefetch(ahead + k * LANES, 0, 2);
        UNROLL for (int n = 0; n < W; n++) row[n] = *(const loose_reg*)(transposed + k * N * LANES + n * REG);
        UNROLL for (int m = 0; m < M; m++) {
            const reg x = reg{} + w[m * depth + k];
            UNROLL for (int n = 0; n < W; n++) sums[m][n] += x * row[n];
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int n = 0; n < W; n++) *(loose_reg*)(c + m * N * LANES + n * REG) = sums[m][n];
}

constexpr long COLUMNS = 48;  // computed together: a multiple of every M below

// COLUMNS columns, or the last `num`, of a product of at most 16·N rows: w xᵀ, transposed in the nearest cache.
template <int N, int M>
inline void panel(const float* transposed, const float* w, float* out, long rows, long num, long columns, long depth) {
    float sums[COLUMNS * N * LANES], back[LANES * LANES];
    if (num == COLUMNS)
        for (long i = 0; i < COLUMNS; i += M) stream<M, N>(depth, w + i * depth, transposed, sums + i * N * LANES);
    else
        strip<N, M>(num, depth, w, depth, 1, transposed, N * LANES, sums, N * LANES, false);
    for (long at = 0; at < num; at += LANES)
        for (long first = 0; first < rows; first += LANES) {
            transpose_tile(sums + at * N * LANES + first, N * LANES, back, LANES);
            const long wide = num - at < LANES ? num - at : LANES, high = rows - first < LANES ? rows - first : LANES;
            for (long i = 0; i < high; i++)
                std::memcpy(out + (first + i) * columns + at, back + i * LANES, wide * sizeof(float));
        }
}

}  // namespace

extern "C" {

// out [rows, columns] = x [rows, depth] · wᵀ, w [columns, depth]: every weight is read from memory once.
void gspo_small_batch_linear(const float* x, const float* w, float* out, long rows, long columns, long depth) {
    constexpr long most = WIDE * LANES;
    float* transposed = scratch(memories[7], depth * (up(rows) + most));
    for (long first = 0; first < rows; first += most) {
        const long here = rows - first < most ? rows - first : most;
        transpose(x + first * depth, depth, here, depth, transposed + first * depth);
    }
#pragma omp parallel for schedule(static)
    for (long at = 0; at < columns; at += COLUMNS) {
        const long num = columns - at < COLUMNS ? columns - at : COLUMNS;
        for (long first = 0; first < rows; first += most) {
            const long here = rows - first < most ? rows - first : most;
            const float *from = transposed + first * depth, *weights = w + at * depth;
            float* to = out + first * columns + at;
            switch (up(here) / LANES) {
                case 1: panel<1, HIGH>(from, weights, to, here, num, columns, depth); break;
                case 2: panel<2, 12>(from, weights, to, here, num, columns, depth); break;
                case 3: panel<3, 8>(from, weights, to, here, num, columns, depth); break;
                default: panel<4, 6>(from, weights, to, here, num, columns, depth);
            }
        }
    }
}

// For logits [rows, columns]: each row's log-prob of its target, entropy, and log of the softmax denominator.
void gspo_chosen(const float* logits, const long* targets, float* chosen, float* entropies, float* logs, long rows,
                 long columns) {
#pragma omp parallel for schedule(static)
    for (long row = 0; row < rows; row++) {
        const float* x = logits + row * columns;
        const long whole = columns / LANES * LANES;
        vec tops = broadcast(-INFINITY);
        for (long i = 0; i < whole; i += LANES) {
            const vec here = load(x + i);
            tops = here > tops ? here : tops;
        }
        float top = max_lane(tops);
        for (long i = whole; i < columns; i++) top = x[i] > top ? x[i] : top;
        double total = 0, mean = 0;  // summed over parts that are short enough for float32
        for (long first = 0; first < columns; first += 64 * LANES) {
            const long last = first + 64 * LANES < whole ? first + 64 * LANES : whole;
            vec weights{}, means{};
            for (long i = first; i < last; i += LANES) {
                const vec shifted = load(x + i) - top, weight = exponential(shifted);
                weights += weight;
                means += weight * (shifted < broadcast(-87.0f) ? broadcast(-87.0f) : shifted);
            }
            total += sum(weights);
            mean += sum(means);
        }
        if (whole < columns) {
            vec rest = broadcast(-INFINITY);
            for (long i = whole; i < columns; i++) rest[i - whole] = x[i];
            const vec shifted = rest - top, weight = exponential(shifted);
            total += sum(weight);
            mean += sum(weight * (shifted < broadcast(-87.0f) ? broadcast(-87.0f) : shifted));
        }
        const double log = std::log(total);
        logs[row] = (float)(top + log);
        chosen[row] = (float)(x[targets[row]] - top - log);
        entropies[row] = (float)(log - mean / total);
    }
}

// The gradient of the logits from those of the log-probs and, unless null, of the entropies.
void gspo_chosen_backward(const float* logits, const long* targets, const float* entropies, const float* logs,
                          const float* of_chosen, const float* of_entropies, float* out, long rows, long columns) {
#pragma omp parallel for schedule(static)
    for (long row = 0; row < rows; row++) {
        const float *x = logits + row * columns, slope = of_chosen[row];
        const float extra = of_entropies ? of_entropies[row] : 0.0f, entropy = entropies[row], log = logs[row];
        float* to = out + row * columns;
        for (long i = 0; i < columns; i += LANES) {
            const long num = columns - i < LANES ? columns - i : LANES;
            vec here = broadcast(-INFINITY);
            if (num == LANES)
                here = load(x + i);
            else
                for (long j = 0; j < num; j++) here[j] = x[i + j];
            const vec shifted = here - log, seen = shifted < broadcast(-87.0f) ? broadcast(-87.0f) : shifted;
            const vec grads = exponential(shifted) * (broadcast(-slope) - (seen + entropy) * extra);
            if (num == LANES)
                store(to + i, grads);
            else
                for (long j = 0; j < num; j++) to[i + j] = grads[j];
        }
        to[targets[row]] += slope;
    }
}

// out [N, heads, size] and the logs [heads, N] of its denominators; q has out's shape, k and v [N, key heads, size].
void gspo_attend(const float* q, const float* k, const float* v, float* out, float* logs, const Sequence* sequences,
                 const Chunk* chunks, long num_chunks, long num_tokens, const Shape* shape) {
    const Shape s = *shape;
    const long ldq = s.heads * s.size, ldk = s.key_heads * s.size;
#pragma omp parallel for schedule(dynamic, 1)
    for (long task = 0; task < num_chunks * s.key_heads; task++) {
        const Chunk chunk = chunks[task / s.key_heads];
        const long head = task % s.key_heads, before = sequences[chunk.first].prefix_length;
        const float* prefix_k = k + sequences[chunk.first].prefix * ldk + head * s.size;
        const float* prefix_v = v + sequences[chunk.first].prefix * ldk + head * s.size;
        const long wide = up(before);
        float* prefix_kt = scratch(memories[0], s.size * wide);
        transpose(prefix_k, ldk, before, s.size, prefix_kt);
        for (long i = chunk.first; i < chunk.first + chunk.count; i++) {
            const Sequence seq = sequences[i];
            const float* own_k = k + seq.start * ldk + head * s.size;
            const float* own_v = v + seq.start * ldk + head * s.size;
            const long ld = wide + up(seq.length), block = block_of(seq.length);
            float* transposed = scratch(memories[1], s.size * up(seq.length));
            float* scores = scratch(memories[2], BLOCK * ld);
            transpose(own_k, ldk, seq.length, s.size, transposed);
            for (long h = head * s.shared(); h < (head + 1) * s.shared(); h++)
                for (long first = 0; first < seq.length; first += block) {
                    const long rows = seq.length - first < block ? seq.length - first : block;
                    const long seen = first + rows, own = up(seen);
                    const float* queries = q + (seq.start + first) * ldq + h * s.size;
                    float* results = out + (seq.start + first) * ldq + h * s.size;
                    float totals[BLOCK];
                    multiply(rows, wide, s.size, queries, ldq, 1, prefix_kt, wide, scores, ld, false);
                    multiply(rows, own, s.size, queries, ldq, 1, transposed, up(seq.length), scores + wide, ld, false);
                    for (long row = 0; row < rows; row++) {
                        float top;
                        mask_unseen(s, seq, first + row, scores + row * ld, wide, own);
                        softmax_row(scores + row * ld, wide + own, s.scale, totals + row, &top);
                        logs[h * num_tokens + seq.start + first + row] = top + std::log(totals[row]);
                    }
                    multiply(rows, s.size, before, scores, ld, 1, prefix_v, ldk, results, ldq, false);
                    multiply(rows, s.size, seen, scores + wide, ld, 1, own_v, ldk, results, ldq, true);
                    for (long row = 0; row < rows; row++)
                        for (long d = 0; d < s.size; d += LANES) {
                            float* at = results + row * ldq + d;
                            store(at, load(at) * (1.0f / totals[row]));
                        }
                }
        }
    }
}

// Gradients of q, k and v. `partials` [2, places, key heads, size] hold each chunk's contribution to its prefix.
void gspo_attend_backward(const float* grad, const float* q, const float* k, const float* v, const float* out,
                          const float* logs, float* grad_q, float* grad_k, float* grad_v, float* partials,
                          long num_places, const Sequence* sequences, const Chunk* chunks, long num_chunks,
                          long num_tokens, const Shape* shape) {
    const Shape s = *shape;
    const long ldq = s.heads * s.size, ldk = s.key_heads * s.size;
    float* partials_v = partials + num_places * ldk;
#pragma omp parallel
    {
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < num_chunks * s.key_heads; task++) {
            const Chunk chunk = chunks[task / s.key_heads];
            const long head = task % s.key_heads, shift = head * s.size;
            const long before = sequences[chunk.first].prefix_length, wide = up(before);
            const float* prefix_k = k + sequences[chunk.first].prefix * ldk + shift;
            const float* prefix_v = v + sequences[chunk.first].prefix * ldk + shift;
            float* prefix_gk = partials + chunk.extra * ldk + shift;
            float* prefix_gv = partials_v + chunk.extra * ldk + shift;
            float* prefix_kt = scratch(memories[0], s.size * wide);
            float* prefix_vt = scratch(memories[1], s.size * wide);
            transpose(prefix_k, ldk, before, s.size, prefix_kt);
            transpose(prefix_v, ldk, before, s.size, prefix_vt);
            bool fresh_prefix = true;
            for (long i = chunk.first; i < chunk.first + chunk.count; i++) {
                const Sequence seq = sequences[i];
                const long own_at = seq.start * ldk + shift, block = block_of(seq.length);
                const long most = up(seq.length), ld = wide + most;
                float* own_kt = scratch(memories[2], s.size * most);
                float* own_vt = scratch(memories[3], s.size * most);
                float* weights = scratch(memories[4], BLOCK * ld);
                float* slopes = scratch(memories[5], BLOCK * ld);
                transpose(k + own_at, ldk, seq.length, s.size, own_kt);
                transpose(v + own_at, ldk, seq.length, s.size, own_vt);
                for (long row = 0; row < seq.length; row++) {
                    std::memset(grad_k + own_at + row * ldk, 0, s.size * sizeof(float));
                    std::memset(grad_v + own_at + row * ldk, 0, s.size * sizeof(float));
                }
                for (long h = head * s.shared(); h < (head + 1) * s.shared(); h++)
                    for (long first = 0; first < seq.length; first += block) {
                        const long rows = seq.length - first < block ? seq.length - first : block;
                        const long seen = first + rows, own = up(seen), at = (seq.start + first) * ldq + h * s.size;
                        multiply(rows, wide, s.size, q + at, ldq, 1, prefix_kt, wide, weights, ld, false);
                        multiply(rows, own, s.size, q + at, ldq, 1, own_kt, most, weights + wide, ld, false);
                        multiply(rows, wide, s.size, grad + at, ldq, 1, prefix_vt, wide, slopes, ld, false);
                        multiply(rows, own, s.size, grad + at, ldq, 1, own_vt, most, slopes + wide, ld, false);
                        for (long row = 0; row < rows; row++) {
                            float *w = weights + row * ld, *x = slopes + row * ld;
                            vec sums{};
                            for (long d = 0; d < s.size; d += LANES)
                                sums += load(grad + at + row * ldq + d) * load(out + at + row * ldq + d);
                            const float mean = sum(sums), log = logs[h * num_tokens + seq.start + first + row];
                            mask_unseen(s, seq, first + row, w, wide, own);
                            for (long j = 0; j < wide + own; j += LANES) {
                                const vec weight = exponential(load(w + j) * s.scale - log);
                                store(w + j, weight);
                                store(x + j, weight * (load(x + j) - mean) * s.scale);
                            }
                        }
                        multiply(rows, s.size, before, slopes, ld, 1, prefix_k, ldk, grad_q + at, ldq, false);
                        multiply(rows, s.size, seen, slopes + wide, ld, 1, k + own_at, ldk, grad_q + at, ldq, true);
                        multiply(before, s.size, rows, slopes, 1, ld, q + at, ldq, prefix_gk, ldk, !fresh_prefix);
                        multiply(before, s.size, rows, weights, 1, ld, grad + at, ldq, prefix_gv, ldk, !fresh_prefix);
                        multiply(seen, s.size, rows, slopes + wide, 1, ld, q + at, ldq, grad_k + own_at, ldk, true);
                        multiply(seen, s.size, rows, weights + wide, 1, ld, grad + at, ldq, grad_v + own_at, ldk, true);
                        fresh_prefix = false;
                    }
            }
        }
#pragma omp for schedule(static)
        for (long head = 0; head < s.key_heads; head++)
            for (long c = 0; c < num_chunks; c++) {
                const Sequence seq = sequences[chunks[c].first];
                for (long i = 0; i < seq.prefix_length; i++)
                    for (long d = head * s.size; d < (head + 1) * s.size; d += LANES) {
                        const long to = (seq.prefix + i) * ldk + d, from = (chunks[c].extra + i) * ldk + d;
                        store(grad_k + to, load(grad_k + to) + load(partials + from));
                        store(grad_v + to, load(grad_v + to) + load(partials_v + from));
                    }
            }
    }
}

// One new token per row: stores its key and value at place lengths[row] of the caches [slots, key heads, most, size],
// then attends. `rows` lists the rows of a chunk, which begin with the same `extra` tokens, side by side.
void gspo_decode_attend(const float* q, const float* k, const float* v, float* cache_k, float* cache_v, float* out,
                        const long* lengths, const long* rows, const Chunk* chunks, long num_chunks, long most,
                        const Shape* shape) {
    const Shape s = *shape;
    const long group = s.shared(), ldq = s.heads * s.size, ldk = s.key_heads * s.size, ldc = most * s.size;
#pragma omp parallel for schedule(static)
    for (long task = 0; task < num_chunks * s.key_heads; task++) {
        const Chunk chunk = chunks[task / s.key_heads];
        const long head = task % s.key_heads, *members = rows + chunk.first;
        const long before = chunk.extra, wide = up(before), num = chunk.count * group;
        long longest = 0;
        for (long i = 0; i < chunk.count; i++) longest = lengths[members[i]] > longest ? lengths[members[i]] : longest;
        const long ld = wide + up(longest + 1 - before);
        float* queries = scratch(memories[0], num * s.size);
        float* results = scratch(memories[1], num * s.size);
        float* scores = scratch(memories[2], num * ld);
        float* transposed = scratch(memories[3], s.size * ld);
        const long prefix = (members[0] * s.key_heads + head) * ldc;
        for (long i = 0; i < chunk.count; i++)
            std::memcpy(queries + i * group * s.size, q + members[i] * ldq + head * group * s.size,
                        group * s.size * sizeof(float));
        transpose(cache_k + prefix, s.size, before, s.size, transposed);
        multiply(num, wide, s.size, queries, s.size, 1, transposed, wide, scores, ld, false);
        for (long i = 0; i < chunk.count; i++) {
            const long row = members[i], length = lengths[row], own = length + 1 - before;
            float* own_k = cache_k + (row * s.key_heads + head) * ldc;
            float* own_v = cache_v + (row * s.key_heads + head) * ldc;
            std::memcpy(own_k + length * s.size, k + row * ldk + head * s.size, s.size * sizeof(float));
            std::memcpy(own_v + length * s.size, v + row * ldk + head * s.size, s.size * sizeof(float));
            const Sequence seq{0, own, 0, before};
            prefetch(own_v + before * s.size, own * s.size);
            if (i + 1 < chunk.count)
                prefetch(cache_k + ((members[i + 1] * s.key_heads + head) * most + before) * s.size, own * s.size);
            transpose(own_k + before * s.size, s.size, own, s.size, transposed);
            multiply(group, up(own), s.size, queries + i * group * s.size, s.size, 1, transposed, up(own),
                     scores + i * group * ld + wide, ld, false);
            for (long g = i * group; g < (i + 1) * group; g++) {
                float total, top;
                mask_unseen(s, seq, own - 1, scores + g * ld, wide, up(own));
                softmax_row(scores + g * ld, wide + up(own), s.scale, &total, &top);
                for (long j = 0; j < wide + up(own); j += LANES)
                    store(scores + g * ld + j, load(scores + g * ld + j) * (1.0f / total));
            }
        }
        multiply(num, s.size, before, scores, ld, 1, cache_v + prefix, s.size, results, s.size, false);
        for (long i = 0; i < chunk.count; i++) {
            const long row = members[i], own = lengths[row] + 1 - before;
            const float* own_v = cache_v + (row * s.key_heads + head) * ldc + before * s.size;
            multiply(group, s.size, own, scores + i * group * ld + wide, ld, 1, own_v, s.size,
                     results + i * group * s.size, s.size, true);
            std::memcpy(out + row * ldq + head * group * s.size, results + i * group * s.size,
                        group * s.size * sizeof(float));
        }
    }
}

}  // extern "C"

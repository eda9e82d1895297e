// Attention of single rows over pages of keys and values, in two passes: parts of the context, then their sum.
//
// A slot is `page * PAGE + offset`; keys and values are [kv_heads][slots][D]. A block of four warps computes up to HEADS query
// heads of one row that share a KV head, over one part of the positions. D / 8 lanes read one position, eight values each.
#include <cuda_fp16.h>
#include <stdint.h>

constexpr int PAGE = 32;
constexpr int WARPS = 4;
constexpr int HEADS = 4;

__device__ __forceinline__ void load8(float (&to)[8], const __half* p) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
        to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
    }
}

__device__ __forceinline__ void load8(float (&to)[8], const float* p) {
    const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// A softmax in progress: the largest score, the sum of the others' exponentials relative to it, and the mix of values. Without
// a position the largest is this instead of minus infinity, whose differences are no numbers.
constexpr float NONE = -1e30f;

// Row r sees positions `ranges[2 r]` up to `ranges[2 r + 1]`; its pages are `pages[r * max_pages ..]`. Of each part
// `parts[row][head][part]` gets the largest score, the sum, and D values.
template <class T, int D>
__device__ __forceinline__ void attend(const float* __restrict__ q, const T* __restrict__ keys, const T* __restrict__ values,
                                       const uint32_t* __restrict__ pages, const uint32_t* __restrict__ ranges,
                                       float* __restrict__ parts, int num_heads, int kv_heads, int slots, int max_pages,
                                       int part_len, float scale, float softcap) {
    constexpr int LANES = D / 8, TOGETHER = 32 / LANES, SUBS = WARPS * TOGETHER;
    __shared__ float shared[SUBS][HEADS][D + 2];
    const int shared_by = num_heads / kv_heads, sets = (shared_by + HEADS - 1) / HEADS;
    const int kv_head = blockIdx.y / sets, row = blockIdx.z;
    const int first_head = blockIdx.y % sets * HEADS, count = min(HEADS, shared_by - first_head);
    const int lane = threadIdx.x % LANES, sub = threadIdx.x / LANES;
    float query[HEADS][8], mix[HEADS][8] = {}, largest[HEADS], sum[HEADS] = {};
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const int head = kv_head * shared_by + first_head + min(h, count - 1);
        load8(query[h], q + (size_t(row) * num_heads + head) * D + 8 * lane);
#pragma unroll
        for (int i = 0; i < 8; i++) query[h][i] *= scale;
        largest[h] = NONE;
    }
    const int start = ranges[2 * row] + blockIdx.x * part_len, end = min(int(ranges[2 * row + 1]), start + part_len);
    // All lanes take part in each round, because they exchange sums.
    for (int round = start; round < end; round += SUBS) {
        const int position = min(round + sub, end - 1);
        const bool is_seen = round + sub < end;
        const size_t slot = size_t(pages[size_t(row) * max_pages + position / PAGE]) * PAGE + position % PAGE;
        const size_t at = (size_t(kv_head) * slots + slot) * D + 8 * lane;
        float key[8], value[8];
        load8(key, keys + at);
        load8(value, values + at);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float score = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) score = fmaf(query[h][i], key[i], score);
#pragma unroll
            for (int far = LANES / 2; far > 0; far /= 2) score += __shfl_xor_sync(0xffffffff, score, far);
            if (softcap > 0) score = softcap * tanhf(score / softcap);
            score = is_seen ? score : NONE;
            const float most = fmaxf(largest[h], score);
            const float kept = __expf(largest[h] - most), weight = is_seen ? __expf(score - most) : 0;
            largest[h] = most;
            sum[h] = fmaf(sum[h], kept, weight);
#pragma unroll
            for (int i = 0; i < 8; i++) mix[h][i] = fmaf(mix[h][i], kept, weight * value[i]);
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
        for (int i = 0; i < 8; i++) shared[sub][h][8 * lane + i] = mix[h][i];
        if (lane == 0) shared[sub][h][D] = largest[h], shared[sub][h][D + 1] = sum[h];
    }
    __syncthreads();
    for (int h = 0; h < count; h++) {
        float most = NONE, total = 0;
        for (int s = 0; s < SUBS; s++) most = fmaxf(most, shared[s][h][D]);
        for (int s = 0; s < SUBS; s++) total = fmaf(shared[s][h][D + 1], __expf(shared[s][h][D] - most), total);
        const int head = kv_head * shared_by + first_head + h;
        float* out = parts + ((size_t(row) * num_heads + head) * gridDim.x + blockIdx.x) * (D + 2);
        if (threadIdx.x == 0) out[0] = most, out[1] = total;
        for (int i = threadIdx.x; i < D; i += 32 * WARPS) {
            float mixed = 0;
            for (int s = 0; s < SUBS; s++) mixed = fmaf(shared[s][h][i], __expf(shared[s][h][D] - most), mixed);
            out[2 + i] = mixed;
        }
    }
}

#define ATTEND(NAME, T, D)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) attend_##NAME##_##D(                                              \
        const float* q, const T* keys, const T* values, const uint32_t* pages, const uint32_t* ranges, float* parts,           \
        int num_heads, int kv_heads, int slots, int max_pages, int part_len, float scale, float softcap) {                     \
        attend<T, D>(q, keys, values, pages, ranges, parts, num_heads, kv_heads, slots, max_pages, part_len, scale, softcap);  \
    }
ATTEND(f16, __half, 64) ATTEND(f16, __half, 128) ATTEND(f16, __half, 256)
ATTEND(f32, float, 64) ATTEND(f32, float, 128) ATTEND(f32, float, 256)

// Sums up the parts of one head of one row: grid [num_heads, rows]. `sinks` are scores without a value, one per head, or null.
extern "C" __global__ void __launch_bounds__(256)
combine(const float* __restrict__ parts, const float* __restrict__ sinks, float* __restrict__ out, int num_parts, int head_dim) {
    const size_t head = size_t(blockIdx.y) * gridDim.x + blockIdx.x;
    const float* of_head = parts + head * num_parts * (head_dim + 2);
    float most = sinks ? sinks[blockIdx.x] : NONE;
    for (int p = 0; p < num_parts; p++) most = fmaxf(most, of_head[p * (head_dim + 2)]);
    float total = sinks ? __expf(sinks[blockIdx.x] - most) : 0;
    for (int p = 0; p < num_parts; p++) {
        const float* part = of_head + p * (head_dim + 2);
        total = fmaf(part[1], __expf(part[0] - most), total);
    }
    for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
        float mixed = 0;
        for (int p = 0; p < num_parts; p++) {
            const float* part = of_head + p * (head_dim + 2);
            mixed = fmaf(part[2 + i], __expf(part[0] - most), mixed);
        }
        out[head * head_dim + i] = mixed / total;
    }
}

// Products of one to eight rows of f32 with a matrix of ggml's blocks: y[m][n] = sum over k of x[m][k] * w[n][k].
//
// Each weight is unpacked once and multiplied in f32, so that nothing is rounded beside the sums. A warp computes OUT rows of
// the matrix; the four warps of a block share a tile of x. The unit of work is 16 consecutive values of a row.
#include <cuda_fp16.h>
#include <stdint.h>

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;

// Sixteen values: value i is `scale * byte(i) - shift`. Bytes are below 128, or signed with eight bits (Q8_0).
struct Unit {
    uint32_t bytes[4];
    float scale, shift;
};

__device__ __forceinline__ uint32_t u16(const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); }

__device__ __forceinline__ float f16(const uint8_t* p) { return __half2float(*reinterpret_cast<const __half*>(p)); }

// Loads 16 bytes from an address that is a multiple of ALIGN. Even addresses are read as whole words and shifted.
template <int ALIGN> __device__ __forceinline__ void load(uint32_t (&to)[4], const uint8_t* p) {
    if (ALIGN == 16) {
        const uint4 v = *reinterpret_cast<const uint4*>(p);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        return;
    }
    const uint32_t odd = ALIGN == 2 ? uint32_t(reinterpret_cast<uintptr_t>(p) & 2) : 0;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(p - odd);
    uint32_t w[5];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = words[i];
    w[4] = odd ? u16(p + 14) : 0; // the last two bytes; the rest of that word may lie beyond the matrix
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = __funnelshift_r(w[i], w[i + 1], 8 * odd);
}

__device__ __forceinline__ void select_bits(uint32_t (&v)[4], int shift, uint32_t mask) {
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = (v[i] >> shift) & mask;
}

// Adds bits of `high`, moved to bit `to`, to the bytes.
__device__ __forceinline__ void add_bits(uint32_t (&v)[4], const uint32_t (&high)[4], int from, uint32_t mask, int to) {
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] |= ((high[i] >> from) & mask) << to;
}

// The layouts are those of ggml-common.h; `sub` counts the units of a block.
struct Q4_0 { // f16 scale, 16 bytes of nibbles
    static constexpr int VALUES = 32, BYTES = 18;
    static constexpr bool SIGNED = false;
    static __device__ __forceinline__ Unit unit(const uint8_t* block, int sub) {
        Unit u;
        load<2>(u.bytes, block + 2);
        select_bits(u.bytes, 4 * sub, 0x0f0f0f0f);
        u.scale = f16(block);
        u.shift = 8 * u.scale;
        return u;
    }
};

struct Q8_0 { // f16 scale, 32 signed bytes
    static constexpr int VALUES = 32, BYTES = 34;
    static constexpr bool SIGNED = true;
    static __device__ __forceinline__ Unit unit(const uint8_t* block, int sub) {
        Unit u;
        load<2>(u.bytes, block + 2 + 16 * sub);
        u.scale = f16(block);
        u.shift = 0;
        return u;
    }
};

struct Q2_K { // 16 bytes of scale and minimum, 64 of two bits, f16 scale and f16 minimum
    static constexpr int VALUES = 256, BYTES = 84;
    static constexpr bool SIGNED = false;
    static __device__ __forceinline__ Unit unit(const uint8_t* block, int sub) {
        Unit u;
        load<4>(u.bytes, block + 16 + 32 * (sub / 8) + 16 * (sub % 2));
        select_bits(u.bytes, sub % 8 / 2 * 2, 0x03030303);
        const uint32_t scales = block[sub];
        u.scale = f16(block + 80) * (scales & 15);
        u.shift = f16(block + 82) * (scales >> 4);
        return u;
    }
};

struct Q3_K { // 32 bytes of high bits, 64 of two low bits, 12 of scales, f16 scale
    static constexpr int VALUES = 256, BYTES = 110;
    static constexpr bool SIGNED = false;
    static __device__ __forceinline__ Unit unit(const uint8_t* block, int sub) {
        Unit u;
        uint32_t high[4];
        const int plane = sub % 8 / 2;
        load<2>(u.bytes, block + 32 + 32 * (sub / 8) + 16 * (sub % 2));
        load<2>(high, block + 16 * (sub % 2));
        select_bits(u.bytes, 2 * plane, 0x03030303);
        add_bits(u.bytes, high, 4 * (sub / 8) + plane, 0x01010101, 2);
        const int low = (block[96 + sub % 8] >> (sub / 8 * 4)) & 15;
        const int top = (block[104 + sub % 4] >> (sub / 4 * 2)) & 3;
        u.scale = f16(block + 108) * (low + 16 * top - 32);
        u.shift = 4 * u.scale;
        return u;
    }
};

// The six bits of scale and minimum of Q4_K and Q5_K, in `head`: both f16 factors, then 12 bytes.
__device__ __forceinline__ void scale_and_min(Unit& u, const uint32_t (&head)[4], int sub) {
    const int at = sub / 2, byte = at % 4 * 8;
    const uint32_t a = head[1] >> byte, b = head[2] >> byte, c = head[3] >> byte;
    const uint32_t scale = at < 4 ? a & 63 : (c & 15) | ((a >> 2) & 48);
    const uint32_t least = at < 4 ? b & 63 : ((c >> 4) & 15) | ((b >> 2) & 48);
    u.scale = __half2float(__ushort_as_half(uint16_t(head[0]))) * scale;
    u.shift = __half2float(__ushort_as_half(uint16_t(head[0] >> 16))) * least;
}

struct Q4_K { // head, 128 bytes of nibbles
    static constexpr int VALUES = 256, BYTES = 144;
    static constexpr bool SIGNED = false;
    static __device__ __forceinline__ Unit unit(const uint8_t* block, int sub) {
        Unit u;
        uint32_t head[4];
        load<16>(head, block);
        load<16>(u.bytes, block + 16 + 32 * (sub / 4) + 16 * (sub % 2));
        select_bits(u.bytes, sub / 2 % 2 * 4, 0x0f0f0f0f);
        scale_and_min(u, head, sub);
        return u;
    }
};

struct Q5_K { // head, 32 bytes of high bits, 128 of nibbles
    static constexpr int VALUES = 256, BYTES = 176;
    static constexpr bool SIGNED = false;
    static __device__ __forceinline__ Unit unit(const uint8_t* block, int sub) {
        Unit u;
        uint32_t head[4], high[4];
        load<16>(head, block);
        load<16>(high, block + 16 + 16 * (sub % 2));
        load<16>(u.bytes, block + 48 + 32 * (sub / 4) + 16 * (sub % 2));
        select_bits(u.bytes, sub / 2 % 2 * 4, 0x0f0f0f0f);
        add_bits(u.bytes, high, sub / 2, 0x01010101, 4);
        scale_and_min(u, head, sub);
        return u;
    }
};

struct Q6_K { // 128 bytes of nibbles, 64 of two high bits, 16 signed scales, f16 scale
    static constexpr int VALUES = 256, BYTES = 210;
    static constexpr bool SIGNED = false;
    static __device__ __forceinline__ Unit unit(const uint8_t* block, int sub) {
        Unit u;
        uint32_t high[4];
        const int half = sub / 8, plane = sub % 8 / 2, part = 16 * (sub % 2);
        load<2>(u.bytes, block + 64 * half + 32 * (plane % 2) + part);
        load<2>(high, block + 128 + 32 * half + part);
        select_bits(u.bytes, plane / 2 * 4, 0x0f0f0f0f);
        add_bits(u.bytes, high, 2 * plane, 0x03030303, 4);
        u.scale = f16(block + 208) * int8_t(block[192 + sub]);
        u.shift = 32 * u.scale;
        return u;
    }
};

// Unpacks values by placing bytes into the mantissa of a float, since conversions of integers are slower than this: 0x3f80_0000
// with a byte below 128 in bits 16 to 22 is 1 + byte / 128, and 0x4b00_0000 with any byte in the lowest bits is 2^23 + byte.
template <bool SIGNED> __device__ __forceinline__ void unpack(float (&w)[16], const Unit& u) {
    const float factor = 128 * u.scale, offset = -(factor + u.shift);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int byte = i % 4;
        if (SIGNED) {
            const uint32_t bits = __byte_perm(u.bytes[i / 4] ^ 0x80808080, 0x4b000000, 0x7440 | byte);
            w[i] = (__uint_as_float(bits) - 8388736.0f) * u.scale;
        } else {
            const uint32_t bits = __byte_perm(u.bytes[i / 4] | 0x80808080, 0x3f00, 0x5044 | byte << 8);
            w[i] = fmaf(__uint_as_float(bits), factor, offset);
        }
    }
}

// `given` rows of x, at most M; `cols` a multiple of a block's values; x on a multiple of 16 bytes.
template <class Block, int M>
__device__ __forceinline__ void product(const uint8_t* __restrict__ weights, const float* __restrict__ x, float* __restrict__ y,
                                        int cols, int rows, int given) {
    constexpr int OUT = M < 4 ? 2 : 4;             // rows of the matrix of a warp
    constexpr int STEPS = M < 4 ? 2 : 1;           // units of a lane in a tile
    constexpr int UNITS = 32 * STEPS;              // of a tile
    constexpr int PER_BLOCK = Block::VALUES / 16;  // units of a block
    constexpr int LOADS = M * UNITS * 4 / THREADS; // quadruples of x that a thread brings to a tile
    // [row][quadruple of a unit][unit]: a warp reads consecutive quadruples. The two more keep writes from meeting in a bank.
    __shared__ float4 tile[M][4][UNITS + 2];
    const int lane = threadIdx.x % 32, first = (blockIdx.x * WARPS + threadIdx.x / 32) * OUT;
    const int units = cols / 16;
    const size_t row_bytes = size_t(cols / Block::VALUES) * Block::BYTES;
    float sums[OUT][M] = {};
    for (int start = 0; start < units; start += UNITS) {
        float4 loaded[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int at = threadIdx.x + i * THREADS, row = min(at / (4 * UNITS), given - 1);
            const int quad = 4 * start + at % (4 * UNITS);
            loaded[i] = quad < 4 * units ? reinterpret_cast<const float4*>(x + size_t(row) * cols)[quad] : float4{};
        }
        Unit unit[STEPS][OUT];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int at = min(start + 32 * step + lane, units - 1); // beyond the end x is zero
#pragma unroll
            for (int o = 0; o < OUT; o++) {
                const uint8_t* row = weights + size_t(min(first + o, rows - 1)) * row_bytes;
                unit[step][o] = Block::unit(row + size_t(at / PER_BLOCK) * Block::BYTES, at % PER_BLOCK);
            }
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int at = threadIdx.x + i * THREADS, quad = at % (4 * UNITS);
            tile[at / (4 * UNITS)][quad % 4][quad / 4] = loaded[i];
        }
        __syncthreads();
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            float w[OUT][16];
#pragma unroll
            for (int o = 0; o < OUT; o++) unpack<Block::SIGNED>(w[o], unit[step][o]);
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int quad = 0; quad < 4; quad++) {
                    const float4 v = tile[m][quad][32 * step + lane];
#pragma unroll
                    for (int o = 0; o < OUT; o++) {
                        const float* at = w[o] + 4 * quad;
                        sums[o][m] = fmaf(v.x, at[0], fmaf(v.y, at[1], fmaf(v.z, at[2], fmaf(v.w, at[3], sums[o][m]))));
                    }
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int o = 0; o < OUT; o++) {
#pragma unroll
        for (int m = 0; m < M; m++) {
            float sum = sums[o][m];
#pragma unroll
            for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
            if (lane == 0 && first + o < rows && m < given) y[size_t(m) * rows + first + o] = sum;
        }
    }
}

#define PRODUCT(BLOCK, NAME, M)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) product_##NAME##_##M(                                                \
        const uint8_t* weights, const float* x, float* y, int cols, int rows, int given) {                                     \
        product<BLOCK, M>(weights, x, y, cols, rows, given);                                                                   \
    }
#define PRODUCTS(BLOCK, NAME) PRODUCT(BLOCK, NAME, 1) PRODUCT(BLOCK, NAME, 2) PRODUCT(BLOCK, NAME, 4) PRODUCT(BLOCK, NAME, 8)
PRODUCTS(Q4_0, q4_0)
PRODUCTS(Q8_0, q8_0)
PRODUCTS(Q2_K, q2_k)
PRODUCTS(Q3_K, q3_k)
PRODUCTS(Q4_K, q4_k)
PRODUCTS(Q5_K, q5_k)
PRODUCTS(Q6_K, q6_k)

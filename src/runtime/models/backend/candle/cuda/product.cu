// Products of one to eight rows of f32 with a matrix of ggml's blocks: y[m][n] = sum over k of x[m][k] * w[n][k]. For more
// rows, `widen` unpacks a matrix to f16, with which cuBLAS multiplies.
//
// Each weight is unpacked once and multiplied in f32, so that nothing is rounded beside the sums. A warp computes OUT rows of
// the matrix; the four warps of a block share a tile of x. The unit of work is 16 consecutive values of a row.
#include <cuda_fp16.h>
#include <stdint.h>

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;

// Twice sixteen values, whose bits share bytes: value i of a half is `scale * byte(i) - shift`. Bytes are below 128, or signed
// with eight bits (Q8_0).
struct Pair {
    uint32_t bytes[2][4];
    float scale[2], shift[2];
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

__device__ __forceinline__ void select_bits(uint32_t (&to)[4], const uint32_t (&from)[4], int shift, uint32_t mask) {
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = (from[i] >> shift) & mask;
}

// Adds bits of `high`, moved to bit `to`, to the bytes.
__device__ __forceinline__ void add_bits(uint32_t (&v)[4], const uint32_t (&high)[4], int from, uint32_t mask, int to) {
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] |= ((high[i] >> from) & mask) << to;
}

// The layouts are those of ggml-common.h. Half h of pair p is unit `p / APART * 2 * APART + p % APART + h * APART` of a block.
struct Q4_0 { // f16 scale, 16 bytes of nibbles
    static constexpr int VALUES = 32, BYTES = 18, APART = 1;
    static constexpr bool SIGNED = false;
    static __device__ __forceinline__ void read(Pair& to, const uint8_t* block, int) {
        uint32_t nibbles[4];
        load<2>(nibbles, block + 2);
        const float scale = f16(block);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            select_bits(to.bytes[h], nibbles, 4 * h, 0x0f0f0f0f);
            to.scale[h] = scale, to.shift[h] = 8 * scale;
        }
    }
};

struct Q8_0 { // f16 scale, 32 signed bytes
    static constexpr int VALUES = 32, BYTES = 34, APART = 1;
    static constexpr bool SIGNED = true;
    static __device__ __forceinline__ void read(Pair& to, const uint8_t* block, int) {
        const float scale = f16(block);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            load<2>(to.bytes[h], block + 2 + 16 * h);
            to.scale[h] = scale, to.shift[h] = 0;
        }
    }
};

struct Q2_K { // 16 bytes of scale and minimum, 64 of two bits, f16 scale and f16 minimum
    static constexpr int VALUES = 256, BYTES = 84, APART = 2;
    static constexpr bool SIGNED = false;
    static __device__ __forceinline__ void read(Pair& to, const uint8_t* block, int pair) {
        uint32_t bits[4];
        const int part = pair % 2, sub = pair / 2 * 4 + part;
        load<4>(bits, block + 16 + 32 * (pair / 4) + 16 * part);
        const float scale = f16(block + 80), least = f16(block + 82);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            select_bits(to.bytes[h], bits, pair / 2 % 2 * 4 + 2 * h, 0x03030303);
            const uint32_t scales = block[sub + 2 * h];
            to.scale[h] = scale * (scales & 15), to.shift[h] = least * (scales >> 4);
        }
    }
};

struct Q3_K { // 32 bytes of high bits, 64 of two low bits, 12 of scales, f16 scale
    static constexpr int VALUES = 256, BYTES = 110, APART = 2;
    static constexpr bool SIGNED = false;
    static __device__ __forceinline__ void read(Pair& to, const uint8_t* block, int pair) {
        uint32_t bits[4], high[4];
        const int part = pair % 2, plane = pair / 2 % 2 * 2, half = pair / 4;
        load<2>(bits, block + 32 + 32 * half + 16 * part);
        load<2>(high, block + 16 * part);
        const float scale = f16(block + 108);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            select_bits(to.bytes[h], bits, 2 * (plane + h), 0x03030303);
            add_bits(to.bytes[h], high, 4 * half + plane + h, 0x01010101, 2);
            const int sub = 2 * (plane + h) + part; // of its half
            const int low = (block[96 + sub] >> (4 * half)) & 15;
            const int top = (block[104 + sub % 4] >> (4 * half + sub / 4 * 2)) & 3;
            to.scale[h] = scale * (low + 16 * top - 32), to.shift[h] = 4 * to.scale[h];
        }
    }
};

// The six bits of scale and minimum of Q4_K and Q5_K, in `head`: both f16 factors, then 12 bytes, of which a pair has two
// neighbours.
__device__ __forceinline__ void scale_and_min(Pair& to, const uint32_t (&head)[4], int pair) {
    const int at = pair / 2, bits = at % 2 * 16;
    const uint32_t a = head[1] >> bits, b = head[2] >> bits, c = head[3] >> bits;
    const uint32_t scales = at < 2 ? a & 0x3f3f : (c & 0x0f0f) | ((a >> 2) & 0x3030);
    const uint32_t least = at < 2 ? b & 0x3f3f : ((c >> 4) & 0x0f0f) | ((b >> 2) & 0x3030);
    const float scale = __half2float(__ushort_as_half(uint16_t(head[0])));
    const float shift = __half2float(__ushort_as_half(uint16_t(head[0] >> 16)));
    to.scale[0] = scale * (scales & 63), to.scale[1] = scale * (scales >> 8 & 63);
    to.shift[0] = shift * (least & 63), to.shift[1] = shift * (least >> 8 & 63);
}

struct Q4_K { // head, 128 bytes of nibbles
    static constexpr int VALUES = 256, BYTES = 144, APART = 2;
    static constexpr bool SIGNED = false;
    static __device__ __forceinline__ void read(Pair& to, const uint8_t* block, int pair) {
        uint32_t head[4], nibbles[4];
        load<16>(head, block);
        load<16>(nibbles, block + 16 + 16 * pair);
        select_bits(to.bytes[0], nibbles, 0, 0x0f0f0f0f);
        select_bits(to.bytes[1], nibbles, 4, 0x0f0f0f0f);
        scale_and_min(to, head, pair);
    }
};

struct Q5_K { // head, 32 bytes of high bits, 128 of nibbles
    static constexpr int VALUES = 256, BYTES = 176, APART = 2;
    static constexpr bool SIGNED = false;
    static __device__ __forceinline__ void read(Pair& to, const uint8_t* block, int pair) {
        uint32_t head[4], high[4], nibbles[4];
        load<16>(head, block);
        load<16>(high, block + 16 + 16 * (pair % 2));
        load<16>(nibbles, block + 48 + 16 * pair);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            select_bits(to.bytes[h], nibbles, 4 * h, 0x0f0f0f0f);
            add_bits(to.bytes[h], high, pair / 2 * 2 + h, 0x01010101, 4);
        }
        scale_and_min(to, head, pair);
    }
};

struct Q6_K { // 128 bytes of nibbles, 64 of two high bits, 16 signed scales, f16 scale
    static constexpr int VALUES = 256, BYTES = 210, APART = 4;
    static constexpr bool SIGNED = false;
    static __device__ __forceinline__ void read(Pair& to, const uint8_t* block, int pair) {
        uint32_t nibbles[4], high[4];
        const int half = pair / 4, plane = pair / 2 % 2, part = pair % 2;
        load<2>(nibbles, block + 64 * half + 32 * plane + 16 * part);
        load<2>(high, block + 128 + 32 * half + 16 * part);
        const float scale = f16(block + 208);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            select_bits(to.bytes[h], nibbles, 4 * h, 0x0f0f0f0f);
            add_bits(to.bytes[h], high, 2 * plane + 4 * h, 0x03030303, 4);
            to.scale[h] = scale * int8_t(block[192 + 8 * half + 4 * h + 2 * plane + part]);
            to.shift[h] = 32 * to.scale[h];
        }
    }
};

// Unpacks values by placing bytes into the mantissa of a float, since conversions of integers are slower than this: 0x3f80_0000
// with a byte below 128 in bits 16 to 22 is 1 + byte / 128, and 0x4b00_0000 with any byte in the lowest bits is 2^23 + byte.
template <bool SIGNED> __device__ __forceinline__ void unpack(float (&w)[16], const Pair& from, int half) {
    const float scale = from.scale[half], factor = 128 * scale, offset = -(factor + from.shift[half]);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int byte = i % 4;
        if (SIGNED) {
            const uint32_t bits = __byte_perm(from.bytes[half][i / 4] ^ 0x80808080, 0x4b000000, 0x7440 | byte);
            w[i] = (__uint_as_float(bits) - 8388736.0f) * scale;
        } else {
            const uint32_t bits = __byte_perm(from.bytes[half][i / 4] | 0x80808080, 0x3f00, 0x5044 | byte << 8);
            w[i] = fmaf(__uint_as_float(bits), factor, offset);
        }
    }
}

// `given` rows of x, at most M; `cols` a multiple of a block's values; x on a multiple of 16 bytes.
template <class Block, int M>
__device__ __forceinline__ void product(const uint8_t* __restrict__ weights, const float* __restrict__ x, float* __restrict__ y,
                                        int cols, int rows, int given) {
    constexpr int OUT = M == 4 ? 4 : 2;            // rows of the matrix of a warp; more at 8 leave no registers
    constexpr int UNITS = 64;                      // of a tile, a pair for each lane
    constexpr int PAIRS = Block::VALUES / 32;      // of a block
    constexpr int LOADS = M * UNITS * 4 / THREADS; // quadruples of x that a thread brings to a tile
    // [row][quadruple of a unit][half][pair]: a warp reads consecutive quadruples. The two more keep writes from meeting in a bank.
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
        Pair pair[OUT];
        const int mine = min(start / 2 + lane, units / 2 - 1); // beyond the end x is zero
        const size_t block = size_t(mine / PAIRS) * Block::BYTES;
#pragma unroll
        for (int o = 0; o < OUT; o++) {
            Block::read(pair[o], weights + size_t(min(first + o, rows - 1)) * row_bytes + block, mine % PAIRS);
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int at = threadIdx.x + i * THREADS, unit = at % (4 * UNITS) / 4;
            const int half = unit / Block::APART % 2, of_half = unit / (2 * Block::APART) * Block::APART + unit % Block::APART;
            tile[at / (4 * UNITS)][at % 4][32 * half + of_half] = loaded[i];
        }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float w[OUT][16];
#pragma unroll
            for (int o = 0; o < OUT; o++) unpack<Block::SIGNED>(w[o], pair[o], half);
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int quad = 0; quad < 4; quad++) {
                    const float4 v = tile[m][quad][32 * half + lane];
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

// Unpacks a pair of each thread to f16; a lane's sixteen values are a sector of memory.
template <class Block>
__device__ __forceinline__ void widen(const uint8_t* __restrict__ weights, uint4* __restrict__ out, int pairs) {
    constexpr int PAIRS = Block::VALUES / 32; // of a block
    const int at = blockIdx.x * THREADS + threadIdx.x, in_block = at % PAIRS;
    if (at >= pairs) return;
    Pair pair;
    Block::read(pair, weights + size_t(at / PAIRS) * Block::BYTES, in_block);
    const size_t first = size_t(at - in_block) * 2 + in_block / Block::APART * 2 * Block::APART + in_block % Block::APART;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float w[16];
        unpack<Block::SIGNED>(w, pair, half);
        uint32_t packed[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t low = __half_as_ushort(__float2half_rn(w[2 * i]));
            packed[i] = low | uint32_t(__half_as_ushort(__float2half_rn(w[2 * i + 1]))) << 16;
        }
        uint4* to = out + 2 * (first + half * Block::APART);
        to[0] = uint4{packed[0], packed[1], packed[2], packed[3]};
        to[1] = uint4{packed[4], packed[5], packed[6], packed[7]};
    }
}

#define WIDEN(BLOCK, NAME)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS) widen_##NAME(const uint8_t* weights, uint4* out, int pairs) {        \
        widen<BLOCK>(weights, out, pairs);                                                                                     \
    }
WIDEN(Q4_0, q4_0)
WIDEN(Q8_0, q8_0)
WIDEN(Q2_K, q2_k)
WIDEN(Q3_K, q3_k)
WIDEN(Q4_K, q4_k)
WIDEN(Q5_K, q5_k)
WIDEN(Q6_K, q6_k)

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

// Runs the CUDA kernels on the CPU, a thread for each thread of a block, and compares them with plain computations in double
// precision: `.ci/cuda emulate`. Shows that arithmetic and indices are right; nothing of races, speed or a GPU's limits.
#include <algorithm>
#include <array>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(threads)
#define __shared__ static // blocks run one after the other
using std::max;
using std::min;

struct Index {
    unsigned x, y, z;
};
static thread_local Index threadIdx, blockIdx;
static Index blockDim, gridDim;
static std::unique_ptr<std::barrier<>> block_barrier;
static std::vector<std::unique_ptr<std::barrier<>>> warp_barriers;
static float exchanged[32][32];

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct float2 {
    float x, y;
};
using __half = _Float16;
struct __half2 {
    __half x, y;
};

static float __half2float(__half value) { return float(value); }
static float2 __half22float2(__half2 pair) { return {float(pair.x), float(pair.y)}; }
#define __expf(value) std::exp(value) // the C library has a function of that name
template <class To, class From> static To bits(From value) {
    To to;
    static_assert(sizeof to == sizeof value);
    std::memcpy(&to, &value, sizeof to);
    return to;
}
static __half __ushort_as_half(uint16_t value) { return bits<__half>(value); }
static __half __float2half_rn(float value) { return __half(value); }
static uint16_t __half_as_ushort(__half value) { return bits<uint16_t>(value); }
static float __uint_as_float(uint32_t value) { return bits<float>(value); }
static uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return uint32_t((low | uint64_t(high) << 32) >> (shift & 31));
}
static uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t all = low | uint64_t(high) << 32;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) result |= uint32_t(all >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
    return result;
}
static void __syncthreads() { block_barrier->arrive_and_wait(); }
static float __shfl_xor_sync(uint32_t, float value, int far) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    exchanged[warp][lane] = value;
    warp_barriers[warp]->arrive_and_wait();
    const float other = exchanged[warp][lane ^ far];
    warp_barriers[warp]->arrive_and_wait();
    return other;
}

#include "../src/runtime/models/backend/candle/cuda/norm_rope.cu"
#include "../src/runtime/models/backend/candle/cuda/product.cu"
namespace attention {
#include "../src/runtime/models/backend/candle/cuda/attention.cu"
}

static void launch(Index grid, unsigned threads, const std::function<void()>& kernel) {
    gridDim = grid, blockDim = {threads, 1, 1};
    block_barrier = std::make_unique<std::barrier<>>(threads);
    warp_barriers.clear();
    for (unsigned warp = 0; warp < threads / 32; warp++) warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
    std::vector<std::thread> all;
    for (unsigned thread = 0; thread < threads; thread++) {
        all.emplace_back([=, &kernel] {
            threadIdx = {thread, 0, 0};
            for (unsigned z = 0; z < grid.z; z++)
                for (unsigned y = 0; y < grid.y; y++)
                    for (unsigned x = 0; x < grid.x; x++) {
                        blockIdx = {x, y, z};
                        kernel();
                        block_barrier->arrive_and_wait();
                    }
        });
    }
    for (std::thread& thread : all) thread.join();
}

static std::mt19937 generator(7);
static std::vector<float> floats(size_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(generator);
    return values;
}

// The larger difference; not a number if one is.
static double worse(double worst, double one) { return one <= worst || std::isnan(worst) ? worst : one; }

static bool is_wrong = false;
static void report(const char* name, double difference, double bound) {
    const bool is_fine = difference <= bound;
    is_wrong |= !is_fine;
    std::printf("%-12s %.1e%s\n", name, difference, is_fine ? "" : " IS WRONG");
}

// Value i of a block, from the definitions of ggml-quants.c, a value at a time.
static double value(const char* type, const uint8_t* b, int i) {
    const auto half = [&](int at) { return double(bits<__half>(uint16_t(b[at] | b[at + 1] << 8))); };
    const auto k4 = [&](int s, bool is_least) { // `b + 4` has the 12 bytes
        const uint8_t* q = b + 4;
        if (s < 4) return q[s + 4 * is_least] & 63;
        return is_least ? (q[s + 4] >> 4) | (q[s] >> 6) << 4 : (q[s + 4] & 15) | (q[s - 4] >> 6) << 4;
    };
    const int shift = i % 128 / 32 * 2, part = i / 128;
    switch (type[1]) {
    case '8': return half(0) * int8_t(b[2 + i]);
    case '2': return half(80) * (b[i / 16] & 15) * (b[16 + 32 * part + i % 32] >> shift & 3) - half(82) * (b[i / 16] >> 4);
    case '3': {
        const int s = i / 16, low = s < 8 ? b[96 + s] & 15 : b[96 + s - 8] >> 4, top = b[104 + s % 4] >> (s / 4 * 2) & 3;
        const int is_high = b[i % 32] >> (i / 32) & 1;
        return half(108) * (low + 16 * top - 32) * ((b[32 + 32 * part + i % 32] >> shift & 3) - (is_high ? 0 : 4));
    }
    case '5': {
        const int high = b[16 + i % 32] >> (i / 32) & 1, low = b[48 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
        return half(0) * k4(i / 32, false) * (low + 16 * high) - half(2) * k4(i / 32, true);
    }
    case '6': {
        const int plane = i % 128 / 32, low = b[64 * part + plane % 2 * 32 + i % 32] >> (plane / 2 * 4) & 15;
        const int high = b[128 + 32 * part + i % 32] >> (2 * plane) & 3;
        return half(208) * int8_t(b[192 + i / 16]) * (low + 16 * high - 32);
    }
    }
    if (type[3] == '0') return half(0) * ((i < 16 ? b[2 + i] & 15 : b[2 + i - 16] >> 4) - 8);
    return half(0) * k4(i / 32, false) * (b[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15) - half(2) * k4(i / 32, true);
}

using Product = void (*)(const uint8_t*, const float*, float*, int, int, int);
using Widen = void (*)(const uint8_t*, uint4*, int);

// Blocks with random bytes, and small factors where a block has them.
static std::vector<uint4> random_blocks(int blocks, int bytes, const std::vector<int>& factors) {
    std::vector<uint4> aligned(size_t(blocks) * bytes / 16 + 2);
    uint8_t* weights = reinterpret_cast<uint8_t*>(aligned.data());
    for (int block = 0; block < blocks; block++) {
        for (int i = 0; i < bytes; i++) weights[block * bytes + i] = uint8_t(generator());
        for (int at : factors) {
            const __half factor = __half(0.001f + 1e-6f * (generator() % 9000));
            std::memcpy(weights + block * bytes + at, &factor, 2);
        }
    }
    return aligned;
}

// 67 blocks, which do not fill the kernel's last block of threads; all values are compared.
static void check_widen(const char* type, int values, int bytes, const std::vector<int>& factors, Widen kernel) {
    const int blocks = 67, pairs = blocks * values / 32;
    const std::vector<uint4> aligned = random_blocks(blocks, bytes, factors);
    const uint8_t* weights = reinterpret_cast<const uint8_t*>(aligned.data());
    std::vector<uint4> out(4 * pairs, uint4{~0u, ~0u, ~0u, ~0u});
    launch({unsigned(pairs + 127) / 128, 1, 1}, 128, [&] { kernel(weights, out.data(), pairs); });
    const __half* widened = reinterpret_cast<const __half*>(out.data());
    double largest = 0, worst = 0;
    for (int at = 0; at < blocks * values; at++) {
        const double expected = value(type, weights + at / values * bytes, at % values);
        const double one = std::fabs(expected - double(float(widened[at])));
        largest = max(largest, std::fabs(expected));
        worst = worse(worst, one);
    }
    report((std::string("widen ") + type).c_str(), worst / largest, 4.9e-4); // half a step of f16
}

static void check_product(const char* type, int values, int bytes, std::vector<int> factors, std::vector<Product> kernels,
                          Widen widen) {
    check_widen(type, values, bytes, factors, widen);
    double worst = 0;
    for (const auto [given, variant, rows, cols] :
         {std::array{1, 0, 9, 2304}, {2, 1, 17, 512}, {3, 2, 33, 1280}, {5, 3, 18, 768}, {8, 3, 16, 256}}) {
        const std::vector<uint4> aligned = random_blocks(rows * cols / values, bytes, factors);
        const uint8_t* weights = reinterpret_cast<const uint8_t*>(aligned.data());
        const std::vector<float> given_x = floats(size_t(given) * cols);
        std::vector<float4> x(given_x.size() / 4);
        std::memcpy(x.data(), given_x.data(), given_x.size() * 4);
        std::vector<float> y(size_t(given) * rows, NAN);
        const int per_block = 4 * (variant == 2 ? 4 : 2);
        launch({unsigned((rows + per_block - 1) / per_block), 1, 1}, 128,
               [&] { kernels[variant](weights, reinterpret_cast<float*>(x.data()), y.data(), cols, rows, given); });
        double largest = 0, difference = 0;
        for (int m = 0; m < given; m++)
            for (int n = 0; n < rows; n++) {
                double sum = 0;
                for (int k = 0; k < cols; k++)
                    sum += given_x[size_t(m) * cols + k] * value(type, weights + (size_t(n) * cols + k) / values * bytes, k % values);
                largest = max(largest, std::fabs(sum));
                const double one = std::fabs(sum - y[size_t(m) * rows + n]);
                difference = worse(difference, one);
            }
        worst = worse(worst, difference / largest);
    }
    report(type, worst, 5e-6);
}

static void check_norm_rope(int head_dim, int half, bool has_norm) {
    const int rows = 3, heads = 3;
    const std::vector<float> x = floats(rows * heads * head_dim), weight = floats(head_dim), turns = floats(rows * half);
    std::vector<float> cosines, sines, out(x.size(), NAN);
    for (float turn : turns) cosines.push_back(std::cos(turn)), sines.push_back(std::sin(turn));
    launch({(rows * heads + 3) / 4, 1, 1}, 128, [&] {
        norm_rope(x.data(), has_norm ? weight.data() : nullptr, cosines.data(), sines.data(), out.data(), rows, heads, head_dim, half, 1e-6f);
    });
    double worst = 0;
    for (int head = 0; head < rows * heads; head++) {
        double squares = 0;
        for (int i = 0; i < head_dim; i++) squares += double(x[head * head_dim + i]) * x[head * head_dim + i];
        const auto normed = [&](int i) {
            return x[head * head_dim + i] * (has_norm ? weight[i] / std::sqrt(squares / head_dim + 1e-6) : 1);
        };
        for (int i = 0; i < head_dim; i++) {
            const int pair = i % max(half, 1), at = head / heads * half + pair;
            double expected = normed(i);
            if (i < half) expected = normed(i) * cosines[at] - normed(i + half) * sines[at];
            else if (i < 2 * half) expected = normed(i - half) * sines[at] + normed(i) * cosines[at];
            const double one = std::fabs(expected - out[head * head_dim + i]);
            worst = worse(worst, one);
        }
    }
    report("norm_rope", worst, 5e-6);
}

// Rows that see position 0, 0 to 69, and 30 to 299; 12 pages in another order for each.
template <class T, class Kernel>
static void check_attention(Kernel kernel, int dim, int heads, int kv_heads, float cap, bool has_sinks, int num_parts) {
    const int rows = 3, num_pages = 12, slots = 32 * num_pages, part_len = (270 + num_parts - 1) / num_parts;
    const auto stored = [&](const std::vector<float>& values) {
        std::vector<uint4> aligned(values.size() * sizeof(T) / 16);
        for (size_t i = 0; i < values.size(); i++) reinterpret_cast<T*>(aligned.data())[i] = T(values[i]);
        return aligned;
    };
    const auto keys = stored(floats(kv_heads * slots * dim)), values = stored(floats(kv_heads * slots * dim));
    const T *k = reinterpret_cast<const T*>(keys.data()), *v = reinterpret_cast<const T*>(values.data());
    const std::vector<float> given_q = floats(rows * heads * dim), sinks = floats(heads);
    std::vector<float4> q(given_q.size() / 4);
    std::memcpy(q.data(), given_q.data(), given_q.size() * 4);
    std::vector<uint32_t> pages, ranges = {0, 1, 0, 70, 30, 300};
    for (int row = 0; row < rows; row++) {
        std::vector<uint32_t> order(num_pages);
        for (int page = 0; page < num_pages; page++) order[page] = page;
        std::shuffle(order.begin(), order.end(), generator);
        pages.insert(pages.end(), order.begin(), order.end());
    }
    std::vector<float> parts(size_t(rows) * heads * num_parts * (dim + 2), NAN), out(given_q.size(), NAN);
    const float scale = 1 / std::sqrt(float(dim));
    const unsigned sets = (heads / kv_heads + 3) / 4;
    launch({unsigned(num_parts), kv_heads * sets, unsigned(rows)}, 128, [&] {
        kernel(reinterpret_cast<float*>(q.data()), k, v, pages.data(), ranges.data(), parts.data(), heads, kv_heads, slots, num_pages,
               part_len, scale, cap);
    });
    launch({unsigned(heads), unsigned(rows), 1}, dim, [&] {
        attention::combine(parts.data(), has_sinks ? sinks.data() : nullptr, out.data(), num_parts, dim);
    });
    double worst = 0;
    for (int row = 0; row < rows; row++)
        for (int head = 0; head < heads; head++) {
            std::vector<double> mixed(dim);
            double total = has_sinks ? std::exp(double(sinks[head])) : 0;
            for (uint32_t position = ranges[2 * row]; position < ranges[2 * row + 1]; position++) {
                const size_t slot = pages[row * num_pages + position / 32] * 32 + position % 32;
                const size_t at = (size_t(head / (heads / kv_heads)) * slots + slot) * dim;
                double score = 0;
                for (int i = 0; i < dim; i++) score += double(given_q[(row * heads + head) * dim + i]) * k[at + i];
                score *= scale;
                const double weight = std::exp(cap > 0 ? cap * std::tanh(score / cap) : score);
                total += weight;
                for (int i = 0; i < dim; i++) mixed[i] += weight * v[at + i];
            }
            for (int i = 0; i < dim; i++) {
                const double one = std::fabs(mixed[i] / total - out[(row * heads + head) * dim + i]);
                worst = worse(worst, one);
            }
        }
    report("attention", worst, 5e-6);
}

#define KERNELS(NAME) {product_##NAME##_1, product_##NAME##_2, product_##NAME##_4, product_##NAME##_8}, widen_##NAME
int main() {
    check_product("q4_0", 32, 18, {0}, KERNELS(q4_0));
    check_product("q8_0", 32, 34, {0}, KERNELS(q8_0));
    check_product("q2_k", 256, 84, {80, 82}, KERNELS(q2_k));
    check_product("q3_k", 256, 110, {108}, KERNELS(q3_k));
    check_product("q4_k", 256, 144, {0, 2}, KERNELS(q4_k));
    check_product("q5_k", 256, 176, {0, 2}, KERNELS(q5_k));
    check_product("q6_k", 256, 210, {208}, KERNELS(q6_k));
    check_norm_rope(128, 64, true);
    check_norm_rope(64, 16, true);
    check_norm_rope(96, 48, false);
    check_attention<__half>(attention::attend_f16_64, 64, 8, 2, 0, true, 2);
    check_attention<__half>(attention::attend_f16_128, 128, 7, 1, 20, false, 1);
    check_attention<__half>(attention::attend_f16_256, 256, 4, 4, 5, true, 4);
    check_attention<float>(attention::attend_f32_64, 64, 6, 2, 0, false, 3);
    check_attention<float>(attention::attend_f32_128, 128, 4, 2, 0, true, 2);
    check_attention<float>(attention::attend_f32_256, 256, 2, 2, 0, true, 2);
    return is_wrong;
}

// Normalises each head by its root mean square, then turns pairs of its values by their angles; without a weight they are only turned.
//
// A warp computes one head: out[row][head] = rope(x / sqrt(mean(x^2) + eps) * weight). Value i < half is paired with
// value i + half; those from 2 * half on are not turned.
extern "C" __global__ void __launch_bounds__(128)
norm_rope(const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ cosines,
          const float* __restrict__ sines, float* __restrict__ out, int num_rows, int heads, int head_dim, int half, float eps) {
    const int head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head >= num_rows * heads) return;
    const float* in = x + size_t(head) * head_dim;
    float* to = out + size_t(head) * head_dim;
    float scale = 1;
    if (weight) {
        float sum = 0;
        for (int i = lane; i < head_dim; i += 32) sum = fmaf(in[i], in[i], sum);
#pragma unroll
        for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
        scale = 1 / sqrtf(sum / head_dim + eps);
    }
    const size_t angles = size_t(head / heads) * half;
    for (int i = lane; i < half; i += 32) {
        const float a = in[i] * scale * (weight ? weight[i] : 1), b = in[i + half] * scale * (weight ? weight[i + half] : 1);
        const float c = cosines[angles + i], s = sines[angles + i];
        to[i] = a * c - b * s;
        to[i + half] = a * s + b * c;
    }
    for (int i = 2 * half + lane; i < head_dim; i += 32) to[i] = in[i] * scale * (weight ? weight[i] : 1);
}

// Scaled dot-product attention whose scores never leave a multiprocessor (Dao, FlashAttention-2, 2023): bfloat16 and float16,
// causal or not, grouped heads, dropout.
//
// Products run on the tensor cores with sums in float; between them everything is float. Probabilities are rounded to T as
// factors of the products that they weight, and so are the gradients of the scores. All sums run in a fixed order: gradients of
// keys and values are summed by the block that owns them, over the queries of each head of its group in turn, those of queries
// over keys.
#include "attention.cuh"

namespace pyckpt {
namespace cuda {

template <class T, int kWidth>
struct ForwardTiles {
  static constexpr int kM = 2, kRows = 16 * kM * kWarps, kKeys = kWidth == 64 ? 64 : 32;
  static size_t bytes() {
    using Rows = Tile<T, kWidth>;
    return simt::shared_size<T>(Rows::elements(kRows)) + 2 * simt::shared_size<T>(2 * Rows::elements(kKeys));
  }
};

// Exponentials are taken relative to a reference that follows the row's maximum once it is this many powers of 2 behind, so that
// the output is seldom scaled again.
constexpr float kSlack = 8;

// Reads q once, and k and v once for each block of queries of a head (from the second-level cache but for the first); writes the
// output and 4 bytes a query. While a tile is worked on, the next one is under way.
template <class T, int kWidth, bool kDropout>
__global__ void __launch_bounds__(kThreads)
    attention_forward_kernel(const __grid_constant__ AttentionCall<T> a, const Operand<T> out, float* logsumexp) {
  using Rows = Tile<T, kWidth>;
  using Tiles = ForwardTiles<T, kWidth>;
  constexpr int kM = Tiles::kM, kKeys = Tiles::kKeys, kBuffer = Rows::elements(kKeys);
  SIMT_DYNAMIC_SHARED(shared);
  T* const q = shared.take<T>(Rows::elements(Tiles::kRows));
  T* const k = shared.take<T>(2 * kBuffer);
  T* const v = shared.take<T>(2 * kBuffer);
  const Place at = place_of(divide_up(a.queries, Tiles::kRows), a.heads, Tiles::kRows, true);
  const int64_t kv_head = divide(at.head, divide(a.heads, a.kv_heads).quotient).quotient;
  const auto k_rows = a.k.rows_of(at.batch, kv_head), v_rows = a.v.rows_of(at.batch, kv_head);
  const int lane = int(threadIdx.x) % 32, of_warp = int(threadIdx.x) / 32 * 16 * kM, column = lane % 4 * 2;
  const int of_lane = of_warp + lane / 4;  // row of [m][half] in the tile: 16 m + 8 half further
  const int64_t tiles = divide_up(a.visible(smaller(at.first + Tiles::kRows, a.queries) - 1), kKeys);
  const DropoutRule rule = a.seeded();

  const auto fetch = [&](int64_t tile) {
    const int buffer = int(tile % 2) * kBuffer;
    Rows::template fetch<kKeys>(k + buffer, k_rows, tile * kKeys, 0, a.seen_keys);
    Rows::template fetch<kKeys>(v + buffer, v_rows, tile * kKeys, 0, a.seen_keys);
    simt::cp_async_commit();
  };
  if (tiles) {
    Rows::template fetch<Tiles::kRows>(q, a.q.rows_of(at.batch, at.head), at.first, a.first_query, a.queries);
    fetch(0);
  }
  float o[kM][kWidth / 8][4] = {}, sum[kM][2] = {}, reference[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) reference[m][0] = reference[m][1] = -infinity<float>();
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int buffer = int(tile % 2) * kBuffer;
    const int64_t first = tile * kKeys;
    simt::cp_async_wait<0>();
    __syncthreads();  // the tile is there, and nobody reads the one before any more, whose place the next takes
    if (tile + 1 < tiles) fetch(tile + 1);
    float s[kM][kKeys / 8][4] = {}, factor[kM][2];
    Rows::multiply_rows(s, q + of_warp * Rows::kPitch, k + buffer);
    const Limits limits = limits_of(a, at.first, first);
    int grown = 0;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = -infinity<float>();
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) s[m][n][i] *= a.scale2;
        if (limits.seen(0) < kKeys) {
          const int seen = limits.seen(of_lane + 16 * m + 8 * half);
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (8 * n + column + i >= seen) s[m][n][2 * half + i] = -infinity<float>();
        }
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));  // NaN left out
        top = row_maximum(top);
        const float before = reference[m][half], next = top > before + kSlack ? top : before;
        const float base = next == -infinity<float>() ? 0.0f : next;
        grown |= next != before;
        factor[m][half] = simt::power_of_two(before - base);
        reference[m][half] = next;
        float part = 0;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            s[m][n][i] = simt::power_of_two(s[m][n][i] - base);
            part += s[m][n][i];
          }
        sum[m][half] = fused(sum[m][half], factor[m][half], part);
      }
    if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) o[m][n][i] *= factor[m][i / 2];
    }
    if constexpr (kDropout) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          const int64_t element = (at.of_all * a.queries + at.first + of_lane + 16 * m) * a.keys + first + 8 * n;
          const unsigned kept = kept_by_columns(rule, element, a.keys);
#pragma unroll
          for (int i = 0; i < 4; ++i) s[m][n][i] = kept >> i & 1 ? s[m][n][i] : 0.0f;
        }
    }
    uint32_t p[kKeys / 16][kM][4];
    as_left<T>(s, p);
    Rows::multiply_columns(o, p, v + buffer);
  }
  const float keep_scale = kDropout ? float(rule.keep_scale) : 1.0f;
  float inverse[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t query = at.first + of_lane + 16 * m + 8 * half;
      const float total = row_sum(sum[m][half]);
      inverse[m][half] = a.visible(query) ? keep_scale / total : 0.0f;
      if (lane % 4 == 0 && query < a.queries)
        logsumexp[at.of_all * a.queries + query] = fused(reference[m][half], kLn2, logf(total));
    }
  Rows::store(
      o, [&](int m, int half) { return inverse[m][half]; }, q + of_warp * Rows::kPitch, out.rows_of(at.batch, at.head),
      at.first + of_warp, a.queries);
}

void attention_forward(const AttentionArguments& a, Where where) {
  with_attention(a, [&](auto type, auto width, auto dropout) {
    using T = typename decltype(type)::type;
    constexpr int kWidth = decltype(width)::value;
    using Tiles = ForwardTiles<T, kWidth>;
    simt::launch(&attention_forward_kernel<T, kWidth, decltype(dropout)::value>,
                 simt::Grid(a.batch * a.heads * divide_up(a.queries, Tiles::kRows)), dim3(kThreads), Tiles::bytes(),
                 simt::Stream{where.first, where.second}, typed<T>(a), operand<T>(a.out), a.logsumexp);
  });
}

}  // namespace cuda
}  // namespace pyckpt

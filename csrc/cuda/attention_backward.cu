// Backward of attention.cu: a pass over the queries, then their gradients by blocks of queries, then those of keys and values by
// blocks of keys. Both form the probabilities again; no block adds to what another one adds to.
#include "attention.cuh"

namespace pyckpt {
namespace cuda {

// For each query, what backward subtracts: its logarithm of the sum, to base 2, and the sum of P dP, which is that of dO O but
// for the output's rounding. For queries that are not there or see nothing, what makes P and dS zero. Reads dO and the output
// once; writes 8 bytes a query.
constexpr int kPreparing = 256;
template <class T, int kWidth>
__global__ void __launch_bounds__(kPreparing)
    attention_rows_kernel(const __grid_constant__ AttentionCall<T> a, const Operand<const T> grad, const Operand<const T> out,
                          const float* logsumexp, float* rows) {
  constexpr int kLanes = kWidth / kVector<T>, kRows = kPreparing / kLanes;
  const Place at = place_of(a.padded / kRows, a.heads, kRows, false);
  const int64_t query = at.first + int(threadIdx.x) / kLanes;
  const int column = int(threadIdx.x) % kLanes * kVector<T>;
  const bool sees = query >= a.first_query && query < a.queries;
  float sum = 0;
  if (sees) {
    const auto of_grad = grad.rows_of(at.batch, at.head), of_out = out.rows_of(at.batch, at.head);
    float g[kVector<T>], o[kVector<T>];
    widen<T>(load<true>(of_grad.first + query * of_grad.stride + column, kVector<T>), g);
    widen<T>(load<true>(of_out.first + query * of_out.stride + column, kVector<T>), o);
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) sum = fused(g[i], o[i], sum);
  }
#pragma unroll
  for (int lanes = kLanes / 2; lanes; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if (column == 0) {
    float* const numbers = rows + at.of_all * 2 * a.padded + query;
    numbers[0] = sees ? logsumexp[at.of_all * a.queries + query] * kLog2e : infinity<float>();
    numbers[a.padded] = sees ? sum : 0.0f;
  }
}

template <class T, int kWidth>
struct QueryTiles {
  static constexpr int kM = 1, kRows = 16 * kM * kWarps, kKeys = kWidth == 64 ? 64 : 32;
  static size_t bytes() {
    using Rows = Tile<T, kWidth>;
    return 2 * simt::shared_size<T>(Rows::elements(kRows)) + 2 * simt::shared_size<T>(2 * Rows::elements(kKeys));
  }
};

// dQ = scale dS K for a block of queries, dS = P (dP - sum(P dP)), dP = dO V^T times dropout's factors. The sum at hand has the
// rounding of the output in it, which may be more than all of eager's errors: where values have much in common, dS is small
// beside it. The sum over a row of these dS, which should cancel, says by how much it is off; sum(P K), from the same fragments
// as dS K, says what that does to dQ; and the right sum is left for the keys' kernel. Reads q, dO and 8 bytes a query once, and k
// and v for each block of queries; writes dq and 4 bytes a query.
template <class T, int kWidth, bool kDropout>
__global__ void __launch_bounds__(kThreads)
    attention_queries_kernel(const __grid_constant__ AttentionCall<T> a, const Operand<const T> grad, float* rows,
                             const Operand<T> dq) {
  using Rows = Tile<T, kWidth>;
  using Tiles = QueryTiles<T, kWidth>;
  constexpr int kM = Tiles::kM, kKeys = Tiles::kKeys, kBuffer = Rows::elements(kKeys);
  SIMT_DYNAMIC_SHARED(shared);
  T* const q = shared.take<T>(Rows::elements(Tiles::kRows));
  T* const g = shared.take<T>(Rows::elements(Tiles::kRows));
  T* const k = shared.take<T>(2 * kBuffer);
  T* const v = shared.take<T>(2 * kBuffer);
  const Place at = place_of(divide_up(a.queries, Tiles::kRows), a.heads, Tiles::kRows, true);
  const int64_t kv_head = divide(at.head, divide(a.heads, a.kv_heads).quotient).quotient;
  const auto k_rows = a.k.rows_of(at.batch, kv_head), v_rows = a.v.rows_of(at.batch, kv_head);
  const int lane = int(threadIdx.x) % 32, of_warp = int(threadIdx.x) / 32 * 16 * kM, column = lane % 4 * 2;
  const int of_lane = of_warp + lane / 4;  // row of [m][half] in the tile: 16 m + 8 half further
  const int64_t tiles = divide_up(a.visible(smaller(at.first + Tiles::kRows, a.queries) - 1), kKeys);
  const DropoutRule rule = a.seeded();
  const float keep_scale = kDropout ? float(rule.keep_scale) : 1.0f;

  const auto fetch = [&](int64_t tile) {
    const int buffer = int(tile % 2) * kBuffer;
    Rows::template fetch<kKeys>(k + buffer, k_rows, tile * kKeys, 0, a.seen_keys);
    Rows::template fetch<kKeys>(v + buffer, v_rows, tile * kKeys, 0, a.seen_keys);
    simt::cp_async_commit();
  };
  if (tiles) {
    Rows::template fetch<Tiles::kRows>(q, a.q.rows_of(at.batch, at.head), at.first, a.first_query, a.queries);
    Rows::template fetch<Tiles::kRows>(g, grad.rows_of(at.batch, at.head), at.first, a.first_query, a.queries);
    fetch(0);
  }
  float* const of_block = rows + at.of_all * 2 * a.padded + at.first;
  float logarithm[kM][2], along[kM][2], off[kM][2] = {};
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      logarithm[m][half] = of_block[of_lane + 16 * m + 8 * half];
      along[m][half] = of_block[a.padded + of_lane + 16 * m + 8 * half];
    }
  float sum[kM][kWidth / 8][4] = {}, weighted_keys[kM][kWidth / 8][4] = {};
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int buffer = int(tile % 2) * kBuffer;
    const int64_t first = tile * kKeys;
    simt::cp_async_wait<0>();
    __syncthreads();  // as in forward
    if (tile + 1 < tiles) fetch(tile + 1);
    float s[kM][kKeys / 8][4] = {}, dp[kM][kKeys / 8][4] = {};
    Rows::multiply_rows(s, q + of_warp * Rows::kPitch, k + buffer);
    Rows::multiply_rows(dp, g + of_warp * Rows::kPitch, v + buffer);
    const Limits limits = limits_of(a, at.first, first);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const int seen[2] = {limits.seen(of_lane + 16 * m), limits.seen(of_lane + 16 * m + 8)};
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        unsigned kept = 15;
        if constexpr (kDropout)
          kept = kept_by_columns(rule, (at.of_all * a.queries + at.first + of_lane + 16 * m) * a.keys + first + 8 * n, a.keys);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float p = simt::power_of_two(fused(s[m][n][i], a.scale2, -logarithm[m][i / 2]));
          const float ds = p * ((kept >> i & 1 ? dp[m][n][i] * keep_scale : 0.0f) - along[m][i / 2]);
          const bool sees = 8 * n + column + i % 2 < seen[i / 2];
          s[m][n][i] = sees ? p : 0.0f;
          dp[m][n][i] = sees ? ds : 0.0f;
          off[m][i / 2] += dp[m][n][i];
        }
      }
    }
    uint32_t p[kKeys / 16][kM][4], ds[kKeys / 16][kM][4];
    as_left<T>(s, p);
    as_left<T>(dp, ds);
    Rows::multiply_columns(sum, ds, weighted_keys, p, k + buffer);
  }
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = row_sum(off[m][half]);
      const float by = logarithm[m][half] == infinity<float>() ? 0.0f : total;  // no such query: zero times junk is junk
      if (tiles && lane % 4 == 0) of_block[a.padded + of_lane + 16 * m + 8 * half] = along[m][half] + by;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) sum[m][n][i] = fused(-by, weighted_keys[m][n][i], sum[m][n][i]);
    }
  if (!dq.data) return;
  Rows::store(
      sum, [&](int m, int half) { return a.visible(at.first + of_lane + 16 * m + 8 * half) ? a.scale : 0.0f; },
      q + of_warp * Rows::kPitch, dq.rows_of(at.batch, at.head), at.first + of_warp, a.queries);
}

template <class T, int kWidth>
struct KeyTiles {
  static constexpr int kM = 1, kKeys = 16 * kM * kWarps, kQueries = kWidth == 64 ? 64 : 32;
  static size_t bytes() {
    using Rows = Tile<T, kWidth>;
    return 2 * simt::shared_size<T>(Rows::elements(kKeys)) + 2 * simt::shared_size<T>(2 * Rows::elements(kQueries)) +
           simt::shared_size<float>(4 * kQueries);
  }
};

// dK = scale dS^T Q and dV = (P F)^T dO, F dropout's factors, for a block of keys; dS as above. Scores are formed transposed, so
// that they are left factors as they stand. Reads k and v once, and q, dO and 8 bytes a query for each block of keys; writes dk
// and dv.
template <class T, int kWidth, bool kDropout>
__global__ void __launch_bounds__(kThreads)
    attention_keys_kernel(const __grid_constant__ AttentionCall<T> a, const Operand<const T> grad, const float* rows,
                          const Operand<T> dk, const Operand<T> dv) {
  using Rows = Tile<T, kWidth>;
  using Tiles = KeyTiles<T, kWidth>;
  constexpr int kM = Tiles::kM, kKeys = Tiles::kKeys, kQueries = Tiles::kQueries, kBuffer = Rows::elements(kQueries);
  SIMT_DYNAMIC_SHARED(shared);
  T* const k = shared.take<T>(Rows::elements(kKeys));
  T* const v = shared.take<T>(Rows::elements(kKeys));
  T* const q = shared.take<T>(2 * kBuffer);
  T* const g = shared.take<T>(2 * kBuffer);
  float* const numbers = shared.take<float>(4 * kQueries);
  const Place at = place_of(divide_up(a.keys, kKeys), a.kv_heads, kKeys, false);
  const int64_t group = divide(a.heads, a.kv_heads).quotient, head0 = at.head * group;
  const int lane = int(threadIdx.x) % 32, of_warp = int(threadIdx.x) / 32 * 16 * kM, column = lane % 4 * 2;
  const int of_lane = of_warp + lane / 4;  // key of [m][half] in the tile: 16 m + 8 half further
  const int64_t seen_from = at.first - a.reach > a.first_query ? at.first - a.reach : a.first_query;
  const int64_t tile0 = seen_from / kQueries;
  const int64_t tiles = at.first < a.seen_keys ? divide_up(a.queries, kQueries) - tile0 : 0;  // of each head
  const DropoutRule rule = a.seeded();
  const float keep_scale = kDropout ? float(rule.keep_scale) : 1.0f;

  const auto fetch = [&](int64_t step) {
    const Division part = divide(step, tiles);
    const int64_t head = head0 + part.quotient, first = (tile0 + part.remainder) * kQueries;
    const int buffer = int(step % 2) * kBuffer;
    Rows::template fetch<kQueries>(q + buffer, a.q.rows_of(at.batch, head), first, a.first_query, a.queries);
    Rows::template fetch<kQueries>(g + buffer, grad.rows_of(at.batch, head), first, a.first_query, a.queries);
    if (threadIdx.x < 2 * kQueries / 4) {
      const int which = int(threadIdx.x) / (kQueries / 4), of_four = int(threadIdx.x) % (kQueries / 4) * 4;
      simt::cp_async_16(numbers + (step % 2 * 2 + which) * kQueries + of_four,
                        rows + ((at.batch * a.heads + head) * 2 + which) * a.padded + first + of_four);
    }
    simt::cp_async_commit();
  };
  const int64_t steps = tiles * group;
  if (steps) {
    Rows::template fetch<kKeys>(k, a.k.rows_of(at.batch, at.head), at.first, 0, a.seen_keys);
    Rows::template fetch<kKeys>(v, a.v.rows_of(at.batch, at.head), at.first, 0, a.seen_keys);
    fetch(0);
  }
  float k_sum[kM][kWidth / 8][4] = {}, v_sum[kM][kWidth / 8][4] = {};
  for (int64_t step = 0; step < steps; ++step) {
    const Division part = divide(step, tiles);
    const int64_t head = head0 + part.quotient, first = (tile0 + part.remainder) * kQueries;
    const int buffer = int(step % 2) * kBuffer;
    const float* const of_tile = numbers + step % 2 * 2 * kQueries;
    simt::cp_async_wait<0>();
    __syncthreads();  // as in forward
    if (step + 1 < steps) fetch(step + 1);
    float s[kM][kQueries / 8][4] = {}, dp[kM][kQueries / 8][4] = {};
    Rows::multiply_rows(s, k + of_warp * Rows::kPitch, q + buffer);
    Rows::multiply_rows(dp, v + of_warp * Rows::kPitch, g + buffer);
    const Limits limits = limits_of(a, first, at.first);
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n)
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const int query = 8 * n + column;
        unsigned kept = 15;
        if constexpr (kDropout)
          kept = kept_by_rows(
              rule, ((at.batch * a.heads + head) * a.queries + first + query) * a.keys + at.first + of_warp + 16 * m, a.keys);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const of_query = of_tile + query + i % 2;
          float p = simt::power_of_two(fused(s[m][n][i], a.scale2, -of_query[0]));
          float ds = p * ((kept >> i & 1 ? dp[m][n][i] * keep_scale : 0.0f) - of_query[kQueries]);
          if (of_lane + 16 * m + i / 2 * 8 >= limits.seen(query + i % 2)) p = ds = 0;
          s[m][n][i] = kept >> i & 1 ? p : 0.0f;
          dp[m][n][i] = ds;
        }
      }
    uint32_t left[kQueries / 16][kM][4];
    as_left<T>(s, left);
    Rows::multiply_columns(v_sum, left, g + buffer);
    as_left<T>(dp, left);
    Rows::multiply_columns(k_sum, left, q + buffer);
  }
  if (dk.data)
    Rows::store(
        k_sum, [&](int, int) { return a.scale; }, k + of_warp * Rows::kPitch, dk.rows_of(at.batch, at.head), at.first + of_warp,
        a.keys);
  if (dv.data)
    Rows::store(
        v_sum, [&](int, int) { return keep_scale; }, v + of_warp * Rows::kPitch, dv.rows_of(at.batch, at.head),
        at.first + of_warp, a.keys);
}

void attention_backward(const AttentionArguments& a, const AttentionGradients& b, Where where) {
  with_attention(a, [&](auto type, auto width, auto dropout) {
    using T = typename decltype(type)::type;
    constexpr int kWidth = decltype(width)::value;
    constexpr bool kDropout = decltype(dropout)::value;
    using ByKeys = KeyTiles<T, kWidth>;
    using ByQueries = QueryTiles<T, kWidth>;
    const AttentionCall<T> call = typed<T>(a);
    const auto grad = operand<const T>(b.grad);
    const simt::Stream stream{where.first, where.second};
    constexpr int kPrepared = kPreparing * kVector<T> / kWidth;  // queries of a block
    simt::launch(&attention_rows_kernel<T, kWidth>, simt::Grid(a.batch * a.heads * (call.padded / kPrepared)), dim3(kPreparing),
                 0, stream, call, grad, operand<const T>(a.out), a.logsumexp, b.rows);
    if (b.dq.data || b.dk.data)
      simt::launch(&attention_queries_kernel<T, kWidth, kDropout>,
                   simt::Grid(a.batch * a.heads * divide_up(a.queries, ByQueries::kRows)), dim3(kThreads), ByQueries::bytes(),
                   stream, call, grad, b.rows, operand<T>(b.dq));
    if (b.dk.data || b.dv.data)
      simt::launch(&attention_keys_kernel<T, kWidth, kDropout>,
                   simt::Grid(a.batch * a.kv_heads * divide_up(a.keys, ByKeys::kKeys)), dim3(kThreads), ByKeys::bytes(), stream,
                   call, grad, b.rows, operand<T>(b.dk), operand<T>(b.dv));
  });
}

}  // namespace cuda
}  // namespace pyckpt

// Random calls with extreme numbers, each in a process of its own: whatever is asked for is computed or refused,
// and never ends the process. Memory is limited, so that an allocation of any absurd size fails.
//
//   extremes [calls]
#include "longspan.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

static uint64_t state;

static uint64_t random_word(void) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state;
}

static unsigned below(unsigned count) { return (unsigned)(random_word() % count); }

static uint64_t extreme(void) {
  static const uint64_t words[] = {0, 1, 2, 3, 16, 31, 32, 33, 255, 257, 4096, 1 << 20, UINT32_MAX, 1ull << 31,
                                   1ull << 32, 1ull << 40, 1ull << 60, INT64_MAX, 1ull << 63, UINT64_MAX};
  return words[below(COUNT(words))];
}

// The end of a call; a panic that the boundary has caught is a finding, too.
static int refused(longspan_status status) {
  if (status == LONGSPAN_STATUS_INTERNAL) {
    fprintf(stderr, "%s\n", longspan_last_error());
    _exit(1);
  }
  return status != LONGSPAN_STATUS_OK;
}

static float q[1024], k[1024], v[1024], out[1024], dout[1024], dq[1024], dk[1024], dv[1024], lse[64], lse_lo[64];

// `(1, 2, 32, 16)`, now and then with an axis or a dtype that is anything; then without elements.
static longspan_tensor tensor(float *data) {
  longspan_tensor made = longspan_tensor_bhsd(data, LONGSPAN_F32, 1, 2, 32, 16);
  if (below(4)) return made;
  if (below(8) == 0) made.dtype = (int32_t)extreme();
  made.shape[below(4)] = (int64_t)extreme();
  made.data = NULL;
  return made;
}

static void layouts(longspan_layout **layout) {
  static const char *patterns[] = {"causal", "causal & window(8, 0)", "strided(3)", "heads([causal, full])", "batch([causal])",
                                   "random(16, 2, 4, 1)", "dilated(16, 2)", "documents([32])", "butterfly(16)",
                                   "hierarchical([(4, 1, 1), (16, 4, 4)])", "neighborhood([4, 8], [1, 2])",
                                   "window(18446744073709551615, 0)", "sinks(1152921504606846976)"};
  longspan_shape shape = LONGSPAN_SHAPE_INIT;
  shape.tokens_q = shape.tokens_k = 32;
  int64_t offset = (int64_t)extreme();
  size_t padding[] = {below(40), below(40)};
  for (unsigned n = below(3); n > 0; n--) switch (below(7)) {
    case 0: shape.tokens_q = (size_t)extreme(); break;
    case 1: shape.tokens_k = (size_t)extreme(); break;
    case 2: shape.batch = (size_t)extreme(), shape.heads = (size_t)extreme(); break;
    case 3: shape.query_offset = &offset; break;
    case 4: shape.key_offset = (int64_t)extreme(); break;
    case 5: shape.block = (size_t)extreme(); break;
    default: shape.batch = 1, shape.heads = 2, shape.key_padding = padding;
    }
  longspan_layout_info info = LONGSPAN_LAYOUT_INFO_INIT;
  *layout = NULL;
  if (!refused(longspan_layout_compile(patterns[below(COUNT(patterns))], &shape, NULL, layout)))
    refused(longspan_layout_get_info(*layout, &info));
}

static longspan_options options(float *list, float *number) {
  uint32_t bits = (uint32_t)random_word();
  memcpy(number, &bits, sizeof bits);
  longspan_options made = LONGSPAN_OPTIONS_INIT;
  for (unsigned n = below(3); n > 0; n--) switch (below(8)) {
    case 0: made.scale = number; break;
    case 1: made.softcap = number; break;
    case 2: made.alibi_slopes = list, made.alibi_heads = below(4); break;
    case 3: made.bias_table = list, made.bias_heads = below(4), made.bias_columns = below(16), made.bias_right = below(18); break;
    case 4: made.sink_logits = list, made.sink_heads = below(4); break;
    case 5: made.dropout_p = below(20) / 16.0; break;
    case 6: made.threads = (size_t)extreme(); break;
    default: made.precision = (int32_t)extreme(), made.isa = (int32_t)below(7);
    }
  return made;
}

static void passes(longspan_attention *attention) {
  longspan_tensor tq = tensor(q), tk = tensor(k), tv = tensor(v), to = tensor(out), td = to;
  longspan_tensor tdq = tq, tdk = tk, tdv = tv;
  uint64_t bytes;
  refused(longspan_bytes_needed(attention, &tq, &tk, &tv, (int32_t)below(3), &bytes));
  refused(longspan_forward(attention, &tq, &tk, &tv, &to, lse, below(2) ? lse_lo : NULL, NULL));
  td.data = to.data ? dout : NULL;
  tdq.data = tq.data ? dq : NULL, tdk.data = tk.data ? dk : NULL, tdv.data = tv.data ? dv : NULL;
  longspan_gradients gradients = LONGSPAN_GRADIENTS_INIT;
  gradients.dq = &tdq, gradients.dk = &tdk, gradients.dv = &tdv;
  refused(longspan_backward(attention, &tq, &tk, &tv, &to, lse, NULL, &td, NULL, &gradients, NULL));
}

static void one(void) {
  float list[64] = {0}, number;
  longspan_options given = options(list, &number);
  longspan_layout *layout;
  longspan_attention *attention;
  layouts(&layout);
  if (layout && !refused(longspan_attention_create(layout, &given, &attention))) {
    passes(attention);
    longspan_attention_free(attention);
  }
  longspan_layout_free(layout);
  uint64_t lengths[] = {extreme(), extreme()}, rates[] = {extreme(), extreme()};
  int64_t offset = (int64_t)extreme();
  longspan_branches branches = LONGSPAN_BRANCHES_INIT;
  branches.count = below(3), branches.segment_lengths = lengths, branches.dilation_rates = rates;
  branches.within = below(2) ? "causal" : NULL, branches.also = below(3) ? NULL : "sinks(2)";
  branches.overlap = (int32_t)below(2), branches.query_offset = below(2) ? &offset : NULL;
  if (!refused(longspan_dilated_create(&branches, &given, &attention))) {
    passes(attention);
    longspan_attention_free(attention);
  }
  longspan_cache *cache;
  if (!refused(longspan_cache_create("causal & window(8, 0)", &given, (size_t)extreme(), &cache))) {
    longspan_tensor tq = tensor(q), tk = tensor(k), tv = tensor(v), to = tensor(out);
    uint64_t tokens;
    refused(longspan_cache_step(cache, &tq, &tk, &tv, NULL, &to, NULL, NULL));
    refused(longspan_cache_length(cache, (size_t)extreme(), &tokens));
    refused(longspan_cache_clear(cache, (size_t)extreme()));
    longspan_cache_free(cache);
  }
}

int main(int argc, char **argv) {
  int calls = argc > 1 ? atoi(argv[1]) : 500, failed = 0;
  for (int n = 0; n < calls; n++) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
      struct rlimit limit = {(rlim_t)8 << 30, (rlim_t)8 << 30};
      setrlimit(RLIMIT_AS, &limit);
      alarm(60);
      state = (uint64_t)(n + 1) * 0x9e3779b97f4a7c15u;
      one();
      _exit(0);
    }
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
      fprintf(stderr, "call %d ended its process: status %d\n", n, status);
      failed++;
    }
  }
  printf("%d random calls, %d of them ended their process\n", calls, failed);
  return failed != 0;
}

// Calls that are wrong: each has a status and a message that names what is wrong.
#include "reference.h"

#include <stdint.h>

static int count;

static void refused(longspan_status status, longspan_status expected, const char *part, int line) {
  const char *said = longspan_last_error();
  if (status != expected || !strstr(said, part)) {
    fprintf(stderr, "line %d: %s: \"%s\", expected %s: \"%s\"\n", line, longspan_status_name(status), said,
            longspan_status_name(expected), part);
    exit(1);
  }
  count++;
}

#define REFUSED(call, status, part) refused(call, LONGSPAN_STATUS_##status, part, __LINE__)

static float data[4096];

static longspan_tensor tensor(void) { return longspan_tensor_bhsd(data, LONGSPAN_F32, 1, 2, 32, 16); }

static void of_layouts(void) {
  longspan_shape good = LONGSPAN_SHAPE_INIT, s;
  good.tokens_q = good.tokens_k = 32;
  longspan_layout *layout;
  int64_t far = INT64_MAX;
  size_t padding[] = {0, 40}, back[] = {9, 3};
  uint8_t mask[1] = {1};
  REFUSED(longspan_layout_compile(NULL, &good, NULL, &layout), INVALID_ARGUMENT, "pattern is null");
  CHECK(layout == NULL);
  REFUSED(longspan_layout_compile("causal", NULL, NULL, &layout), INVALID_ARGUMENT, "longspan_shape is null");
  REFUSED(longspan_layout_compile("causal", &good, NULL, NULL), INVALID_ARGUMENT, "new layout is null");
  REFUSED(longspan_layout_compile("causl", &good, NULL, &layout), INVALID_PATTERN, "causal");
  REFUSED(longspan_layout_compile("window(3", &good, NULL, &layout), INVALID_PATTERN, "window(3");
  REFUSED(longspan_layout_compile("\xff", &good, NULL, &layout), INVALID_ARGUMENT, "not UTF-8");
  REFUSED(longspan_layout_compile("documents([3])", &good, NULL, &layout), INVALID_PATTERN, "32");
  REFUSED(longspan_layout_compile("heads([causal, full])", &good, NULL, &layout), INVALID_ARGUMENT, "shape.batch is 0");
  s = good, s.size = 0;
  REFUSED(longspan_layout_compile("causal", &s, NULL, &layout), INVALID_ARGUMENT, "longspan_shape.size is 0");
  s = good, s.size = SIZE_MAX;
  REFUSED(longspan_layout_compile("causal", &s, NULL, &layout), INVALID_ARGUMENT, "LONGSPAN_SHAPE_INIT");
  s = good, s.block = 7;
  REFUSED(longspan_layout_compile("causal", &s, NULL, &layout), INVALID_ARGUMENT, "block size is 7");
  s = good, s.tokens_q = SIZE_MAX;
  REFUSED(longspan_layout_compile("causal", &s, NULL, &layout), TOO_LARGE, "2^60");
  s = good, s.query_offset = &far;
  REFUSED(longspan_layout_compile("causal", &s, NULL, &layout), TOO_LARGE, "2^60");
  s = good, s.batch = 1;
  REFUSED(longspan_layout_compile("causal", &s, NULL, &layout), INVALID_ARGUMENT, "shape.heads is 0");
  s = good, s.batch = (size_t)1 << 40, s.heads = 1;
  REFUSED(longspan_layout_compile("causal", &s, NULL, &layout), TOO_LARGE, "1099511627776 × 1");
  s.tokens_q = s.tokens_k = 0;
  REFUSED(longspan_layout_from_mask(NULL, &s, NULL, &layout), TOO_LARGE, "2^24");
  s = good, s.batch = s.heads = 1, s.key_padding = padding;
  REFUSED(longspan_layout_compile("causal", &s, NULL, &layout), INVALID_ARGUMENT, "entry 0 is 0 to 40");
  s.key_padding = back;
  REFUSED(longspan_layout_compile("causal", &s, NULL, &layout), INVALID_ARGUMENT, "entry 0 is 9 to 3");
  s = good, s.batch = 1, s.heads = 3;
  REFUSED(longspan_layout_compile("heads([causal, full])", &s, NULL, &layout), INVALID_PATTERN, "2 patterns for 3");
  longspan_hook empty = {NULL, NULL};
  REFUSED(longspan_layout_compile("causal", &good, &empty, &layout), INVALID_ARGUMENT, "hook.progress is null");
  REFUSED(longspan_layout_from_mask(NULL, &good, NULL, &layout), INVALID_ARGUMENT, "mask is null");
  s = good, s.key_offset = 1;
  REFUSED(longspan_layout_from_mask(mask, &s, NULL, &layout), INVALID_ARGUMENT, "offsets");
  s = good, s.tokens_q = s.tokens_k = SIZE_MAX / 2;
  REFUSED(longspan_layout_from_mask(mask, &s, NULL, &layout), TOO_LARGE, "counted");
  longspan_layout_info info = {0};
  OK(longspan_layout_compile("causal", &good, NULL, &layout));
  REFUSED(longspan_layout_get_info(layout, &info), INVALID_ARGUMENT, "longspan_layout_info.size is 0");
  REFUSED(longspan_layout_get_info(NULL, &info), INVALID_ARGUMENT, "layout is null");
  longspan_layout_free(layout);
  longspan_layout_free(NULL);
}

static void of_options(longspan_layout *layout) {
  longspan_options good = LONGSPAN_OPTIONS_INIT, o;
  longspan_attention *attention;
  float number = 1, infinite = INFINITY;
  longspan_executor idle = {NULL, 0, NULL};
#define OPTION(field, value, status, part)                                                         \
  o = good, o.field = value;                                                                       \
  REFUSED(longspan_attention_create(layout, &o, &attention), status, part)
  OPTION(size, 8, INVALID_ARGUMENT, "longspan_options.size is 8");
  OPTION(isa, 99, INVALID_ARGUMENT, "isa is 99");
#if defined(__x86_64__)
  OPTION(isa, LONGSPAN_ISA_NEON, UNSUPPORTED, "isa is neon, this CPU has");
#endif
  OPTION(precision, -1, INVALID_ARGUMENT, "precision is -1");
  OPTION(threads, 5000, INVALID_ARGUMENT, "5000 threads");
  OPTION(dropout_p, 1.5, INVALID_ARGUMENT, "1.5");
  OPTION(alibi_heads, 2, INVALID_ARGUMENT, "alibi_slopes is null with 2 elements");
  OPTION(bias_right, 3, INVALID_ARGUMENT, "bias_right is 3 without a bias_table");
  OPTION(executor, &idle, INVALID_ARGUMENT, "executor has 0 threads");
  o = good, o.bias_table = &number, o.bias_heads = o.bias_columns = 1, o.bias_right = 1;
  REFUSED(longspan_attention_create(layout, &o, &attention), INVALID_ARGUMENT, "bias_right is 1 with 1 columns");
  REFUSED(longspan_attention_create(NULL, NULL, &attention), INVALID_ARGUMENT, "layout is null");
  REFUSED(longspan_attention_set_options(NULL, NULL), INVALID_ARGUMENT, "attention is null");
  // What depends on tensors is found by the call.
  longspan_tensor t = tensor(), out = t;
  out.data = data + 2048;
  o = good, o.scale = &infinite;
  OK(longspan_attention_create(layout, &o, &attention));
  REFUSED(longspan_forward(attention, &t, &t, &t, &out, NULL, NULL, NULL), INVALID_ARGUMENT, "scale is inf");
  longspan_attention_free(attention);
  o = good, o.sink_logits = &number, o.sink_heads = 1;
  OK(longspan_attention_create(layout, &o, &attention));
  REFUSED(longspan_forward(attention, &t, &t, &t, &out, NULL, NULL, NULL), INVALID_ARGUMENT, "sink_logits has 1 elements, expected 2");
  longspan_attention_free(attention);
}

static void of_tensors(longspan_layout *layout) {
  longspan_attention *attention;
  OK(longspan_attention_create(layout, NULL, &attention));
  longspan_tensor t = tensor(), out = t, w;
  out.data = data + 2048;
  float *lse = data + 1024;
#define FORWARD(q, k, v, out, lse) longspan_forward(attention, q, k, v, out, lse, NULL, NULL)
  REFUSED(FORWARD(NULL, &t, &t, &out, NULL), INVALID_ARGUMENT, "q is a null pointer");
  w = t, w.data = NULL;
  REFUSED(FORWARD(&t, &w, &t, &out, NULL), INVALID_ARGUMENT, "k.data is null");
  w = t, w.dtype = 7;
  REFUSED(FORWARD(&t, &t, &w, &out, NULL), INVALID_ARGUMENT, "v.dtype is 7");
  w = t, w.dtype = LONGSPAN_BF16;
  REFUSED(FORWARD(&t, &w, &t, &out, NULL), INVALID_ARGUMENT, "k.dtype is 1, expected 0, as q");
  w = t, w.shape[2] = -1;
  REFUSED(FORWARD(&w, &t, &t, &out, NULL), INVALID_ARGUMENT, "q.shape[2] is -1");
  w = t, w.shape[2] = 31;
  REFUSED(FORWARD(&w, &t, &t, &out, NULL), INVALID_ARGUMENT, "31");
  w = t, w.shape[1] = 3;
  REFUSED(FORWARD(&w, &t, &t, &out, NULL), INVALID_ARGUMENT, "3 query heads and 2 key heads");
  w = t, w.shape[3] = 300;
  REFUSED(FORWARD(&w, &t, &t, &out, NULL), INVALID_ARGUMENT, "300");
  w = t, w.shape[2] = INT64_MAX;
  REFUSED(FORWARD(&w, &t, &t, &out, NULL), INVALID_ARGUMENT, "q: a tensor of");
  w = t, w.data = (char *)data + 1;
  REFUSED(FORWARD(&t, &t, &w, &out, NULL), INVALID_ARGUMENT, "v: a tensor at address");
  w = out, w.strides[2] = 0;
  REFUSED(FORWARD(&t, &t, &t, &w, NULL), INVALID_ARGUMENT, "overlap");
  REFUSED(FORWARD(&t, &t, &t, &t, NULL), INVALID_ARGUMENT, "overlap");
  REFUSED(FORWARD(&t, &t, &t, &out, data), INVALID_ARGUMENT, "overlap");
  REFUSED(FORWARD(&t, &t, &t, &out, (float *)((char *)lse + 2)), INVALID_ARGUMENT, "lse is at");
  REFUSED(longspan_forward(NULL, &t, &t, &t, &out, NULL, NULL, NULL), INVALID_ARGUMENT, "attention is null");
  longspan_gradients none = LONGSPAN_GRADIENTS_INIT;
#define BACKWARD(lse, gradients) longspan_backward(attention, &t, &t, &t, &t, lse, NULL, &t, NULL, gradients, NULL)
  REFUSED(BACKWARD(lse, NULL), INVALID_ARGUMENT, "longspan_gradients is null");
  REFUSED(BACKWARD(lse, &none), INVALID_ARGUMENT, "gradients.dq is a null pointer");
  none.dq = none.dk = none.dv = &out;
  REFUSED(BACKWARD(NULL, &none), INVALID_ARGUMENT, "lse is null");
  REFUSED(BACKWARD(lse, &none), INVALID_ARGUMENT, "overlap");
  uint64_t bytes;
  REFUSED(longspan_bytes_needed(attention, &t, &t, &t, 2, &bytes), INVALID_ARGUMENT, "pass is 2");
  REFUSED(longspan_merge(&out, NULL, NULL, &t, lse), INVALID_ARGUMENT, "lse is null");
  w = t, w.shape[1] = 1;
  REFUSED(longspan_merge(&out, data + 3072, NULL, &w, lse), INVALID_ARGUMENT, "other output");
  longspan_attention_free(attention);
}

static void of_branches(void) {
  uint64_t lengths[] = {16, 0}, rates[] = {1, 2}, bounds[] = {0, 32};
  longspan_branches b = LONGSPAN_BRANCHES_INIT;
  longspan_attention *attention;
#define DILATED longspan_dilated_create(&b, NULL, &attention)
  REFUSED(longspan_dilated_create(NULL, NULL, &attention), INVALID_ARGUMENT, "longspan_branches is null");
  REFUSED(DILATED, INVALID_ARGUMENT, "no branches");
  b.count = 2, b.segment_lengths = lengths;
  REFUSED(DILATED, INVALID_ARGUMENT, "dilation_rates is null with 2 elements");
  b.dilation_rates = rates;
  REFUSED(DILATED, INVALID_PATTERN, "segment");
  b.count = 1, b.within = "causall";
  REFUSED(DILATED, INVALID_PATTERN, "within");
  b.within = NULL, b.overlap = 5;
  REFUSED(DILATED, INVALID_ARGUMENT, "overlap is 5");
  b.overlap = 0, b.cu_seqlens = 2, b.cu_seqlens_q = bounds;
  REFUSED(DILATED, INVALID_ARGUMENT, "cu_seqlens_k is null");
}

static void of_caches(void) {
  longspan_cache *cache;
  uint64_t tokens;
  REFUSED(longspan_cache_create("nothing", NULL, 0, &cache), INVALID_PATTERN, "nothing");
  OK(longspan_cache_create("causal", NULL, 0, &cache));
  longspan_tensor t = tensor(), half = t;
  REFUSED(longspan_cache_clear(cache, 0), INVALID_ARGUMENT, "entry is 0, expected one below 0");
  REFUSED(longspan_cache_length(NULL, 0, &tokens), INVALID_ARGUMENT, "cache is null");
  OK(longspan_cache_append(cache, &t, &t, NULL));
  half.dtype = LONGSPAN_F16;
  REFUSED(longspan_cache_append(cache, &half, &half, NULL), INVALID_ARGUMENT, "f16");
  size_t lengths[] = {33};
  REFUSED(longspan_cache_append(cache, &t, &t, lengths), INVALID_ARGUMENT, "33");
  REFUSED(longspan_cache_length(cache, 1, &tokens), INVALID_ARGUMENT, "entry is 1");
  longspan_cache_free(cache);
}

int main(void) {
  longspan_shape shape = LONGSPAN_SHAPE_INIT;
  shape.tokens_q = shape.tokens_k = 32;
  longspan_layout *layout;
  OK(longspan_layout_compile("causal", &shape, NULL, &layout));
  of_layouts();
  of_options(layout);
  of_tensors(layout);
  of_branches();
  of_caches();
  longspan_layout_free(layout);
  longspan_trim();
  printf("%d calls were refused as they should be\n", count);
  return count >= 40 ? 0 : 1;
}

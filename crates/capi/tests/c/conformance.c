// Every function of longspan.h against attention in double precision.
#include "reference.h"

#include <pthread.h>
#include <stdint.h>

static int window(int head, int query, int key) {
  (void)head;
  return key <= query && (query - key <= 20 || key < 3);
}

static int causal(int head, int query, int key) {
  (void)head;
  return key <= query;
}

static int per_head(int head, int query, int key) { return head ? key <= query : abs(query - key) <= 7; }

// Two branches, (16, 1) and (32, 2), a key that both have counting twice.
static int branches(int head, int query, int key) {
  int offset = head % 2;
  int first = query / 16 == key / 16;
  int second = query / 32 == key / 32 && query % 32 % 2 == offset && key % 32 % 2 == offset;
  return key <= query ? first + second : 0;
}

static longspan_tensor bhsd(float *data, int batch, int heads, int tokens, int dim) {
  return longspan_tensor_bhsd(data, LONGSPAN_F32, batch, heads, tokens, dim);
}

static longspan_layout *compiled(const char *pattern, sizes s, int of_each) {
  longspan_shape shape = LONGSPAN_SHAPE_INIT;
  shape.tokens_q = s.queries, shape.tokens_k = s.keys;
  if (of_each) shape.batch = s.batch, shape.heads = s.heads;
  longspan_layout *layout;
  OK(longspan_layout_compile(pattern, &shape, NULL, &layout));
  return layout;
}

// Both passes of an attention against the truth.
static void both_passes(longspan_attention *attention, sizes s, pairs active) {
  size_t rows = (size_t)s.batch * s.heads * s.queries, keys = (size_t)s.batch * s.key_heads * s.keys;
  float *q = numbers(rows * s.dim, 1), *k = numbers(keys * s.dim, 2), *v = numbers(keys * s.value_dim, 3);
  float *dout = numbers(rows * s.value_dim, 4), *out = numbers(rows * s.value_dim, 5);
  float *lse = numbers(rows, 6), *lse_lo = numbers(rows, 7);
  float *dq = numbers(rows * s.dim, 8), *dk = numbers(keys * s.dim, 9), *dv = numbers(keys * s.value_dim, 10);
  longspan_tensor tq = bhsd(q, s.batch, s.heads, s.queries, s.dim);
  longspan_tensor tk = bhsd(k, s.batch, s.key_heads, s.keys, s.dim);
  longspan_tensor tv = bhsd(v, s.batch, s.key_heads, s.keys, s.value_dim);
  longspan_tensor tout = bhsd(out, s.batch, s.heads, s.queries, s.value_dim), tdout = tout;
  tdout.data = dout;
  longspan_tensor tdq = tq, tdk = tk, tdv = tv;
  tdq.data = dq, tdk.data = dk, tdv.data = dv;
  uint64_t bytes = 0;
  OK(longspan_bytes_needed(attention, &tq, &tk, &tv, LONGSPAN_PASS_FORWARD, &bytes));
  CHECK(bytes >= rows * s.value_dim * sizeof(float));
  OK(longspan_forward(attention, &tq, &tk, &tv, &tout, lse, lse_lo, NULL));
  longspan_gradients gradients = LONGSPAN_GRADIENTS_INIT;
  gradients.dq = &tdq, gradients.dk = &tdk, gradients.dv = &tdv;
  OK(longspan_backward(attention, &tq, &tk, &tv, &tout, lse, lse_lo, &tdout, NULL, &gradients, NULL));
  truth t = reference(s, q, k, v, dout, active);
  CHECK(close_to(out, t.out, rows * s.value_dim));
  CHECK(close_to(lse, t.lse, rows));
  CHECK(close_to(dq, t.dq, rows * s.dim));
  CHECK(close_to(dk, t.dk, keys * s.dim));
  CHECK(close_to(dv, t.dv, keys * s.value_dim));
  // Without the log-sum-exp.
  memset(out, 0xff, rows * s.value_dim * sizeof(float));
  OK(longspan_forward(attention, &tq, &tk, &tv, &tout, NULL, NULL, NULL));
  CHECK(close_to(out, t.out, rows * s.value_dim));
  free_truth(t);
  free(q), free(k), free(v), free(dout), free(out), free(lse), free(lse_lo), free(dq), free(dk), free(dv);
}

static void layouts(void) {
  sizes cases[] = {{2, 4, 2, 97, 97, 16, 16}, {1, 2, 1, 31, 67, 24, 8}, {1, 2, 2, 53, 20, 8, 8}, {1, 1, 1, 1, 1, 1, 1}};
  for (size_t n = 0; n < COUNT(cases); n++) {
    longspan_layout *layout = compiled("causal & (window(20, 0) | sinks(3))", cases[n], 0);
    longspan_attention *attention;
    OK(longspan_attention_create(layout, NULL, &attention));
    longspan_layout_free(layout);
    both_passes(attention, cases[n], window);
    longspan_attention_free(attention);
  }
  sizes s = cases[1];
  longspan_layout *layout = compiled("heads([window(7, 7), causal])", s, 1);
  longspan_layout_info info = LONGSPAN_LAYOUT_INFO_INIT;
  OK(longspan_layout_get_info(layout, &info));
  uint64_t count = 0;
  for (int h = 0; h < 2; h++)
    for (int i = 0; i < s.queries; i++)
      for (int j = 0; j < s.keys; j++) count += per_head(h, i + s.keys - s.queries, j);
  CHECK(info.active_pairs == count && info.heads == 2 && info.batch == 1 && info.tokens_q == 31);
  longspan_attention *attention;
  OK(longspan_attention_create(layout, NULL, &attention));
  both_passes(attention, s, per_head);
  longspan_attention_free(attention);
  longspan_layout_free(layout);
}

static void masks(void) {
  sizes s = {2, 2, 1, 40, 70, 16, 16};
  uint8_t *mask = malloc(2 * 2 * 40 * 70), *to = mask;
  for (int b = 0; b < 2; b++)
    for (int h = 0; h < 2; h++)
      for (int i = 0; i < 40; i++)
        for (int j = 0; j < 70; j++) *to++ = per_head(h, i + 30, j) ? 255 : 0;
  longspan_shape shape = LONGSPAN_SHAPE_INIT;
  shape.tokens_q = 40, shape.tokens_k = 70, shape.batch = 2, shape.heads = 2;
  longspan_layout *layout;
  OK(longspan_layout_from_mask(mask, &shape, NULL, &layout));
  free(mask);
  longspan_attention *attention;
  OK(longspan_attention_create(layout, NULL, &attention));
  longspan_layout_free(layout);
  both_passes(attention, s, per_head);
  longspan_attention_free(attention);
}

static void dilated(void) {
  uint64_t lengths[] = {16, 32}, rates[] = {1, 2};
  longspan_branches given = LONGSPAN_BRANCHES_INIT;
  given.count = 2, given.segment_lengths = lengths, given.dilation_rates = rates, given.within = "causal";
  longspan_attention *attention;
  OK(longspan_dilated_create(&given, NULL, &attention));
  both_passes(attention, (sizes){1, 4, 2, 75, 75, 16, 16}, branches);
  longspan_attention_free(attention);
}

// Half of the keys each, merged, are all keys.
static void merge(void) {
  sizes s = {1, 2, 2, 33, 64, 16, 16};
  float *q = numbers(2 * 33 * 16, 1), *k = numbers(2 * 64 * 16, 2), *v = numbers(2 * 64 * 16, 3);
  float *dout = numbers(2 * 33 * 16, 4), *out[2] = {numbers(2 * 33 * 16, 5), numbers(2 * 33 * 16, 6)};
  float *lse[2] = {numbers(2 * 33, 7), numbers(2 * 33, 8)}, *lse_lo = numbers(2 * 33, 9);
  longspan_tensor tq = bhsd(q, 1, 2, 33, 16), touts[2];
  for (int half = 0; half < 2; half++) {
    int64_t query_offset = 31;
    longspan_shape shape = LONGSPAN_SHAPE_INIT;
    shape.tokens_q = 33, shape.tokens_k = 32, shape.query_offset = &query_offset, shape.key_offset = 32 * half;
    longspan_layout *layout;
    OK(longspan_layout_compile("causal", &shape, NULL, &layout));
    longspan_attention *attention;
    OK(longspan_attention_create(layout, NULL, &attention));
    longspan_layout_free(layout);
    longspan_tensor tk = bhsd(k, 1, 2, 64, 16), tv = bhsd(v, 1, 2, 64, 16);
    tk.shape[2] = tv.shape[2] = 32;
    tk.data = k + half * 32 * 16, tv.data = v + half * 32 * 16;
    touts[half] = bhsd(out[half], 1, 2, 33, 16);
    OK(longspan_forward(attention, &tq, &tk, &tv, &touts[half], lse[half], half ? NULL : lse_lo, NULL));
    longspan_attention_free(attention);
  }
  OK(longspan_merge(&touts[0], lse[0], lse_lo, &touts[1], lse[1]));
  truth t = reference(s, q, k, v, dout, causal);
  CHECK(close_to(out[0], t.out, 2 * 33 * 16));
  CHECK(close_to(lse[0], t.lse, 2 * 33));
  free_truth(t);
  free(q), free(k), free(v), free(dout), free(out[0]), free(out[1]), free(lse[0]), free(lse[1]), free(lse_lo);
}

// A prompt and one token at a time, in bf16 and f32, are one call over all tokens.
static void decode(void) {
  sizes s = {1, 4, 2, 60, 60, 16, 16};
  float *q = numbers(4 * 60 * 16, 1), *k = numbers(2 * 60 * 16, 2), *v = numbers(2 * 60 * 16, 3);
  float *dout = numbers(4 * 60 * 16, 4), *out = numbers(4 * 60 * 16, 5);
  longspan_cache *cache;
  OK(longspan_cache_create("causal & (window(20, 0) | sinks(3))", NULL, 60, &cache));
  for (int first = 0, count = 30; first < 60; first += count, count = 1) {
    longspan_tensor parts[] = {bhsd(q, 1, 4, 60, 16), bhsd(k, 1, 2, 60, 16), bhsd(v, 1, 2, 60, 16), bhsd(out, 1, 4, 60, 16)};
    for (size_t n = 0; n < COUNT(parts); n++) {
      parts[n].data = (float *)parts[n].data + first * 16;
      parts[n].shape[2] = count;
    }
    OK(longspan_cache_step(cache, &parts[0], &parts[1], &parts[2], NULL, &parts[3], NULL, NULL));
  }
  uint64_t tokens;
  OK(longspan_cache_length(cache, 0, &tokens));
  CHECK(tokens == 60);
  truth t = reference(s, q, k, v, dout, window);
  CHECK(close_to(out, t.out, 4 * 60 * 16));
  OK(longspan_cache_clear(cache, 0));
  OK(longspan_cache_length(cache, 0, &tokens));
  CHECK(tokens == 0);
  size_t lengths[] = {7};
  longspan_tensor tk = bhsd(k, 1, 2, 60, 16), tv = bhsd(v, 1, 2, 60, 16);
  OK(longspan_cache_append(cache, &tk, &tv, lengths));
  OK(longspan_cache_length(cache, 0, &tokens));
  CHECK(tokens == 7);
  longspan_cache_free(cache);
  free_truth(t);
  free(q), free(k), free(v), free(dout), free(out);
}

// Options change results, and their gradients are written.
static void options(void) {
  float scale = 0.25f, cap = 3, slopes[] = {0.1f, 0.2f}, sinks[] = {0.5f, -1}, table[2 * 9] = {0};
  sizes s = {1, 2, 2, 40, 40, 16, 16};
  longspan_layout *layout = compiled("causal", s, 0);
  longspan_options given = LONGSPAN_OPTIONS_INIT;
  longspan_attention *attention;
  OK(longspan_attention_create(layout, &given, &attention));
  longspan_layout_free(layout);
  both_passes(attention, s, causal);
  // The default, said.
  given.scale = &scale, given.threads = 1, given.isa = LONGSPAN_ISA_PORTABLE;
  OK(longspan_attention_set_options(attention, &given));
  both_passes(attention, s, causal);
  given.softcap = &cap, given.alibi_slopes = slopes, given.alibi_heads = 2;
  given.sink_logits = sinks, given.sink_heads = 2;
  given.bias_table = table, given.bias_heads = 2, given.bias_columns = 9, given.bias_right = 4;
  OK(longspan_attention_set_options(attention, &given));
  float *x[10];
  for (unsigned n = 0; n < COUNT(x); n++) x[n] = numbers(2 * 40 * 16, n);
  longspan_tensor t[10];
  for (size_t n = 0; n < COUNT(t); n++) t[n] = bhsd(x[n], 1, 2, 40, 16);
  float dsinks[2] = {NAN, NAN}, dslopes[2] = {NAN, NAN}, dtable[18];
  for (size_t n = 0; n < COUNT(dtable); n++) dtable[n] = NAN;
  OK(longspan_forward(attention, &t[0], &t[1], &t[2], &t[3], x[8], NULL, NULL));
  longspan_gradients gradients = LONGSPAN_GRADIENTS_INIT;
  gradients.dq = &t[5], gradients.dk = &t[6], gradients.dv = &t[7];
  gradients.dsink_logits = dsinks, gradients.sink_heads = 2;
  gradients.dalibi_slopes = dslopes, gradients.alibi_heads = 2;
  gradients.dbias_table = dtable, gradients.bias_elements = 18;
  OK(longspan_backward(attention, &t[0], &t[1], &t[2], &t[3], x[8], NULL, &t[4], NULL, &gradients, NULL));
  // A bias of all pairs changes no probability: its gradients add up to 0.
  double sum = 0, largest = 0;
  for (size_t n = 0; n < COUNT(dtable); n++) sum += dtable[n], largest = fmax(largest, fabs(dtable[n]));
  // But for the sinks, whose share is theirs.
  sum += (double)dsinks[0] + dsinks[1];
  CHECK(largest > 1e-3 && fabs(sum) < 1e-4 * largest * 18);
  CHECK(isfinite(dslopes[0]) && isfinite(dslopes[1]) && dslopes[0] != 0);
  for (size_t n = 0; n < COUNT(x); n++) free(x[n]);
  longspan_attention_free(attention);
}

// A thread per participant and call.
typedef struct {
  int (*step)(void *task);
  void *task;
} share;

static int runs;

static void *participant(void *context) {
  share *own = context;
  while (own->step(own->task)) {
  }
  return NULL;
}

static void run(void *context, size_t threads, int (*step)(void *task), void *task) {
  pthread_t others[3];
  share own = {step, task};
  CHECK(threads <= 4 && *(int *)context == 42);
  runs++;
  for (size_t n = 1; n < threads; n++) CHECK(pthread_create(&others[n - 1], NULL, participant, &own) == 0);
  participant(&own);
  for (size_t n = 1; n < threads; n++) CHECK(pthread_join(others[n - 1], NULL) == 0);
}

// The same bits on the threads of a caller.
static void executor(void) {
  sizes s = {1, 4, 4, 500, 500, 32, 32};
  int context = 42;
  longspan_executor own = {&context, 4, run};
  longspan_options given = LONGSPAN_OPTIONS_INIT;
  longspan_layout *layout = compiled("causal", s, 0);
  float *x = numbers(4 * 500 * 32, 1), *out[2] = {numbers(4 * 500 * 32, 2), numbers(4 * 500 * 32, 3)};
  longspan_tensor t = bhsd(x, 1, 4, 500, 32);
  for (int n = 0; n < 2; n++) {
    longspan_attention *attention;
    longspan_tensor to = bhsd(out[n], 1, 4, 500, 32);
    OK(longspan_attention_create(layout, &given, &attention));
    OK(longspan_forward(attention, &t, &t, &t, &to, NULL, NULL, NULL));
    longspan_attention_free(attention);
    CHECK((runs > 0) == n);
    given.executor = &own;
  }
  CHECK(!memcmp(out[0], out[1], 4 * 500 * 32 * sizeof(float)));
  free(x), free(out[0]), free(out[1]);
  longspan_layout_free(layout);
}

static int stop_at(void *context, uint64_t done, uint64_t total) {
  (void)done, (void)total;
  return --*(int *)context < 0;
}

static void cancellation(void) {
  sizes s = {1, 4, 4, 500, 500, 32, 32};
  int left = 0;
  longspan_hook hook = {&left, stop_at};
  longspan_shape shape = LONGSPAN_SHAPE_INIT;
  shape.tokens_q = shape.tokens_k = 1 << 20;
  longspan_layout *layout = (longspan_layout *)&left;
  CHECK(longspan_layout_compile("causal", &shape, &hook, &layout) == LONGSPAN_STATUS_STOPPED);
  CHECK(layout == NULL && strstr(longspan_last_error(), "stopped"));
  layout = compiled("causal", s, 0);
  longspan_attention *attention;
  // One thread: it asks between its tasks, and others could have done all of them before it is scheduled.
  longspan_options given = LONGSPAN_OPTIONS_INIT;
  given.threads = 1;
  OK(longspan_attention_create(layout, &given, &attention));
  longspan_layout_free(layout);
  float *x = numbers(4 * 500 * 32, 1), *out = numbers(4 * 500 * 32, 2);
  longspan_tensor t = bhsd(x, 1, 4, 500, 32), to = bhsd(out, 1, 4, 500, 32);
  left = 0;
  CHECK(longspan_forward(attention, &t, &t, &t, &to, NULL, NULL, &hook) == LONGSPAN_STATUS_STOPPED);
  left = 1 << 30;
  OK(longspan_forward(attention, &t, &t, &t, &to, NULL, NULL, &hook));
  CHECK(left < 1 << 30);
  free(x), free(out);
  longspan_attention_free(attention);
}

// An older program has shorter structs, a newer one longer ones.
static void growth(void) {
  struct {
    longspan_shape known;
    size_t later;
  } newer = {LONGSPAN_SHAPE_INIT, 0};
  newer.known.size = sizeof(newer), newer.known.tokens_q = newer.known.tokens_k = 10;
  longspan_layout *layout;
  OK(longspan_layout_compile("causal", &newer.known, NULL, &layout));
  longspan_layout_free(layout);
  newer.later = 1;
  CHECK(longspan_layout_compile("causal", &newer.known, NULL, &layout) == LONGSPAN_STATUS_INVALID_ARGUMENT);
  CHECK(strstr(longspan_last_error(), "does not know"));
}

int main(void) {
  CHECK(!strcmp(longspan_version(), "0.1.0") && !*longspan_last_error());
  layouts();
  masks();
  dilated();
  merge();
  decode();
  options();
  executor();
  cancellation();
  growth();
  longspan_trim();
  puts("every function is right");
}

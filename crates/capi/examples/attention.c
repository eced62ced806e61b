// Causal attention over a window of 256 keys and 16 sinks: forward, backward, then token by token.
//
//   cc -std=c11 attention.c $(pkg-config --cflags --libs longspan) -lm -o attention && ./attention
#include <longspan.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 4, KV_HEADS = 2, TOKENS = 1000, DIM = 32 };

static const char *PATTERN = "causal & (window(256, 0) | sinks(16))";

// Ends the program where a call has failed, with what the library says of it.
static void check(longspan_status status) {
  if (status != LONGSPAN_STATUS_OK) {
    fprintf(stderr, "%s: %s\n", longspan_status_name(status), longspan_last_error());
    exit(1);
  }
}

// A tensor (batch 1, head, token, dim) of f32, with memory of its own.
static longspan_tensor tensor(int heads, double frequency) {
  float *data = malloc(sizeof(float) * heads * TOKENS * DIM);
  for (int i = 0; i < heads * TOKENS * DIM; i++) data[i] = (float)sin(frequency * i);
  return longspan_tensor_bhsd(data, LONGSPAN_F32, 1, heads, TOKENS, DIM);
}

// One token of each head.
static longspan_tensor token(longspan_tensor all, int index) {
  all.data = (float *)all.data + index * all.strides[2];
  all.shape[2] = 1;
  return all;
}

int main(void) {
  longspan_shape shape = LONGSPAN_SHAPE_INIT;
  shape.tokens_q = shape.tokens_k = TOKENS;
  longspan_layout *layout;
  check(longspan_layout_compile(PATTERN, &shape, NULL, &layout));
  longspan_layout_info info = LONGSPAN_LAYOUT_INFO_INIT;
  check(longspan_layout_get_info(layout, &info));
  printf("longspan %s: %.1f %% of all pairs\n", longspan_version(), 100.0 * (double)info.active_pairs / TOKENS / TOKENS);

  longspan_options options = LONGSPAN_OPTIONS_INIT;
  options.threads = 2;
  longspan_attention *attention;
  check(longspan_attention_create(layout, &options, &attention));
  longspan_layout_free(layout);

  // Four query heads that share two key heads.
  longspan_tensor q = tensor(HEADS, 0.37), k = tensor(KV_HEADS, 0.61), v = tensor(KV_HEADS, 0.83);
  longspan_tensor out = tensor(HEADS, 0), dout = tensor(HEADS, 0.19);
  longspan_tensor dq = tensor(HEADS, 0), dk = tensor(KV_HEADS, 0), dv = tensor(KV_HEADS, 0);
  float *lse = malloc(sizeof(float) * HEADS * TOKENS), *lse_lo = malloc(sizeof(float) * HEADS * TOKENS);
  check(longspan_forward(attention, &q, &k, &v, &out, lse, lse_lo, NULL));

  longspan_gradients gradients = LONGSPAN_GRADIENTS_INIT;
  gradients.dq = &dq;
  gradients.dk = &dk;
  gradients.dv = &dv;
  check(longspan_backward(attention, &q, &k, &v, &out, lse, lse_lo, &dout, NULL, &gradients, NULL));
  longspan_attention_free(attention);

  // The same, one token after the other, over a cache that holds no more than the pattern reaches.
  longspan_cache *cache;
  check(longspan_cache_create(PATTERN, &options, 0, &cache));
  float step[HEADS * DIM];
  longspan_tensor to = longspan_tensor_bhsd(step, LONGSPAN_F32, 1, HEADS, 1, DIM);
  double apart = 0;
  for (int i = 0; i < TOKENS; i++) {
    longspan_tensor own_q = token(q, i), own_k = token(k, i), own_v = token(v, i), expected = token(out, i);
    check(longspan_cache_step(cache, &own_q, &own_k, &own_v, NULL, &to, NULL, NULL));
    for (int h = 0; h < HEADS; h++)
      for (int d = 0; d < DIM; d++) {
        double all = ((float *)expected.data)[h * expected.strides[1] + d];
        apart = fmax(apart, fabs((double)step[h * DIM + d] - all));
      }
  }
  longspan_cache_free(cache);
  printf("%d tokens one by one are at most %.0e away\n", TOKENS, apart);

  longspan_tensor all[] = {q, k, v, out, dout, dq, dk, dv};
  for (size_t n = 0; n < sizeof(all) / sizeof(all[0]); n++) free(all[n].data);
  free(lse);
  free(lse_lo);
  longspan_trim();
  return apart < 1e-5 ? 0 : 1;
}

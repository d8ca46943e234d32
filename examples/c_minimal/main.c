/* One forward and one backward of Kimi Delta Attention on the CPU, from C. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <kda/c_api.h>

static void check(kda_status status) {
  if (status == KDA_OK) return;
  fprintf(stderr, "c_minimal: %s: %s\n", kda_status_name(status), kda_last_error());
  exit(1);
}

/* Memory at a multiple of 64 bytes, which is what a workspace needs. */
static void* memory(size_t bytes) { return aligned_alloc(64, (bytes + 64) / 64 * 64); }

/* Adds an fp32 tensor to the arguments, with some numbers in it. */
static float* tensor(const kda_problem* problem, kda_args* args, kda_tensor_id id, double low,
                     double high) {
  size_t bytes;
  check(kda_problem_layout(problem, id, NULL, &bytes));
  float* values = memory(bytes);
  for (size_t i = 0; i < bytes / sizeof(float); ++i) {
    values[i] = (float)(low + (high - low) * (0.5 + 0.5 * sin(0.7 * (double)i + (double)id)));
  }
  args->data[id] = values;
  return values;
}

static void run(const kda_problem* problem, kda_args* args) {
  kda_plan* plan;
  check(kda_plan_create(problem, KDA_CPU, 0, NULL, &plan));
  args->workspace_bytes = kda_plan_workspace_bytes(plan);
  args->workspace = memory(args->workspace_bytes);
  check(kda_plan_run(plan, args, NULL));
  free(args->workspace);
  kda_plan_destroy(plan);
}

int main(void) {
  kda_problem forward, backward; /* B = 1, T = 100, H = HV = 2, K = 32, V = 16 */
  kda_args args;
  kda_args_init(&args);
  check(kda_problem_make(&forward, KDA_CHUNK_FORWARD, 1, 100, 2, 2, 32, 16, KDA_F32));
  check(kda_problem_make(&backward, KDA_CHUNK_BACKWARD, 1, 100, 2, 2, 32, 16, KDA_F32));
  forward.qk_l2norm = backward.qk_l2norm = 1; /* normalise q and k inside */

  tensor(&forward, &args, KDA_Q, -1, 1);
  tensor(&forward, &args, KDA_K, -1, 1);
  tensor(&forward, &args, KDA_V, -1, 1);
  tensor(&forward, &args, KDA_G, -0.5, 0);
  tensor(&forward, &args, KDA_BETA, 0, 1);
  const float* o = tensor(&forward, &args, KDA_O, 0, 0);
  run(&forward, &args);
  printf("o: %.6f %.6f ... %.6f\n", o[0], o[1], o[100 * 2 * 16 - 1]);

  /* The gradient of the sum of o: its gradient is 1 everywhere. */
  backward.tensors[KDA_DQ].dtype = backward.tensors[KDA_DV].dtype = KDA_F32;
  tensor(&backward, &args, KDA_DO, 1, 1);
  const float* dq = tensor(&backward, &args, KDA_DQ, 0, 0);
  const float* dv = tensor(&backward, &args, KDA_DV, 0, 0);
  run(&backward, &args);
  printf("dq: %.6f %.6f ... %.6f\n", dq[0], dq[1], dq[100 * 2 * 32 - 1]);
  printf("dv: %.6f %.6f ... %.6f\n", dv[0], dv[1], dv[100 * 2 * 16 - 1]);
  for (int i = 0; i < KDA_MAX_TENSORS; ++i) free(args.data[i]);
  return 0;
}

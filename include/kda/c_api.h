/* C interface of native-kda: the whole library behind plain C types.
 *
 * Most functions return a kda_status; kda_last_error() then has one line of text for the calling
 * thread. None throws. Structures are filled by their _init function, which also stores
 * struct_size: the library tells by it which header the caller was built with. Enumerators have the
 * values of the C++ enums of the same name (kda/types.h). Shapes, dtypes and meanings of tensors:
 * kda_tensor_spec_at. */
#ifndef KDA_C_API_H_
#define KDA_C_API_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KDA_API __attribute__((visibility("default")))
#else
#define KDA_API
#endif

/* In C++ the underlying type is fixed, so that every value a C caller may pass is a valid one. */
#ifdef __cplusplus
#define KDA_INT32 : int32_t
extern "C" {
#else
#define KDA_INT32
#endif

typedef enum kda_status KDA_INT32 {
  KDA_OK = 0,
  KDA_INVALID_ARGUMENT = 1, /* the call itself is wrong */
  KDA_UNSUPPORTED = 2,      /* this implementation or machine cannot; the text names the feature */
  KDA_DEVICE_ERROR = 3,
  KDA_OUT_OF_MEMORY = 4,
  KDA_INTERNAL = 5
} kda_status;

typedef enum kda_dtype KDA_INT32 {
  KDA_NONE = 0, /* the tensor is absent */
  KDA_BF16 = 1,
  KDA_F16 = 2,
  KDA_F32 = 3,
  KDA_F64 = 4,
  KDA_I32 = 5,
  KDA_I64 = 6
} kda_dtype;

typedef enum kda_device_type KDA_INT32 { KDA_CPU = 0, KDA_CUDA = 1 } kda_device_type;

typedef enum kda_gate KDA_INT32 {
  KDA_GATE_NONE = 0,
  KDA_GATE_SOFTPLUS = 1,
  KDA_GATE_LOWER_BOUND = 2
} kda_gate;

typedef enum kda_operation KDA_INT32 {
  KDA_CHUNK_FORWARD = 0,
  KDA_CHUNK_BACKWARD = 1,
  KDA_RECURRENT = 2,
  KDA_GATE_CUMSUM = 3,
  KDA_INTRA = 4,
  KDA_WU = 5,
  KDA_STATE_SCAN = 6,
  KDA_OUTPUT = 7,
  KDA_REVERSE_SCAN = 8,
  KDA_WY_BACKWARD = 9,
  KDA_INTRA_BACKWARD = 10
} kda_operation;

typedef enum kda_tensor_id KDA_INT32 {
  KDA_Q = 0,
  KDA_K,
  KDA_V,
  KDA_G,
  KDA_BETA,
  KDA_A_LOG,
  KDA_DT_BIAS,
  KDA_INITIAL_STATE,
  KDA_CU_SEQLENS,
  KDA_STATE_INDICES,
  KDA_DO,
  KDA_DFINAL_STATE,
  KDA_O,
  KDA_FINAL_STATE,
  KDA_DQ,
  KDA_DK,
  KDA_DV,
  KDA_DG,
  KDA_DBETA,
  KDA_DA_LOG,
  KDA_DDT_BIAS,
  KDA_DINITIAL_STATE,
  KDA_GAMMA,
  KDA_AQK,
  KDA_A,
  KDA_W,
  KDA_U,
  KDA_KG,
  KDA_QG,
  KDA_H,
  KDA_V_NEW,
  KDA_DQ_RAW,
  KDA_DH,
  KDA_DV_NEW,
  KDA_DP,
  KDA_DL,
  KDA_DQ_PARTIAL,
  KDA_DK_PARTIAL,
  KDA_DG_PARTIAL,
  KDA_DBETA_PARTIAL,
  KDA_NUM_ACCEPTED
} kda_tensor_id;

/* Capacity of the arrays below; more than there are tensors, so that the layout stays. */
#define KDA_MAX_TENSORS 64

typedef struct kda_tensor_layout {
  int32_t dtype; /* kda_dtype; KDA_NONE = absent */
  int32_t rank;  /* 0: the shape that the sizes give, contiguous; shape and stride are ignored */
  int64_t shape[4];
  int64_t stride[4]; /* in elements, 0 or more; read only with a rank */
} kda_tensor_layout;

/* See Problem in kda/problem.h. */
typedef struct kda_problem {
  size_t struct_size;
  int32_t operation; /* kda_operation */
  int32_t gate;      /* kda_gate */
  int64_t B, T, H, HV, K, V, N, P;
  double scale; /* used if has_scale, else K^-0.5 */
  double lower_bound;
  int32_t has_scale;
  int32_t qk_l2norm;
  int32_t beta_sigmoid;
  int32_t allow_neg_eigval;
  int32_t state_v_first;
  int32_t chunk_size;
  kda_tensor_layout tensors[KDA_MAX_TENSORS]; /* indexed by kda_tensor_id */
} kda_problem;

/* See Options in kda/plan.h. */
typedef struct kda_options {
  size_t struct_size;
  const char* implementation; /* NULL or "": the environment variable KDA_IMPL, else the fastest */
  int32_t threads;            /* CPU threads; 0: OpenMP's default */
  size_t workspace_limit;     /* bytes; 0: the variable KDA_WORKSPACE_LIMIT, else no limit */
} kda_options;

/* See Args in kda/plan.h. */
typedef struct kda_args {
  size_t struct_size;
  void* data[KDA_MAX_TENSORS]; /* indexed by kda_tensor_id; inputs are not written */
  void* workspace;
  size_t workspace_bytes;
} kda_args;

/* One row of an operation's signature. */
typedef struct kda_tensor_spec {
  int32_t id; /* kda_tensor_id */
  int32_t is_output;
  int32_t required;
  const char* name;   /* "q" */
  const char* shape;  /* "[B,T,H,K]" */
  const char* dtypes; /* "as q" */
  const char* about;
} kda_tensor_spec;

typedef struct kda_implementation {
  const char* name;
  const char* family;
  int32_t operation;
  int32_t device_type;
  const char* features;
} kda_implementation;

typedef struct kda_plan kda_plan; /* immutable; usable from many threads */

/* "0.1.0" */
KDA_API const char* kda_version(void);
/* Text of the last failure on this thread, "" after a success. Valid until the next call. */
KDA_API const char* kda_last_error(void);
KDA_API const char* kda_status_name(kda_status status);

/* Zeroes the structure and sets struct_size, B = H = HV = 1, chunk_size = 64. */
KDA_API void kda_problem_init(kda_problem* problem);
/* As above, with the sizes given and the required tensors present (Problem::make). */
KDA_API kda_status kda_problem_make(kda_problem* problem, kda_operation operation, int64_t B,
                                    int64_t T, int64_t H, int64_t HV, int64_t K, int64_t V,
                                    kda_dtype io);
KDA_API void kda_options_init(kda_options* options);
KDA_API void kda_args_init(kda_args* args);

/* The shape, strides and bytes that a tensor of this problem has. Of an absent one, which is no
 * failure, the shape that it would have, with dtype none and 0 bytes. */
KDA_API kda_status kda_problem_layout(const kda_problem* problem, kda_tensor_id id,
                                      kda_tensor_layout* layout, size_t* bytes);

/* Creates a plan; *plan must be destroyed. options may be NULL. On failure *plan is NULL. */
KDA_API kda_status kda_plan_create(const kda_problem* problem, kda_device_type device_type,
                                   int32_t device_index, const kda_options* options,
                                   kda_plan** plan);
/* NULL is allowed. Whatever is done with a plan afterwards is undefined, as after free. */
KDA_API void kda_plan_destroy(kda_plan* plan);
KDA_API size_t kda_plan_workspace_bytes(const kda_plan* plan);
/* Valid as long as the library is loaded. */
KDA_API const char* kda_plan_implementation(const kda_plan* plan);
/* stream: a cudaStream_t, NULL for the default stream; ignored on the CPU. */
KDA_API kda_status kda_plan_run(const kda_plan* plan, const kda_args* args, void* stream);

/* KDA_OK exactly when kda_plan_create would succeed. */
KDA_API kda_status kda_supports(const kda_problem* problem, kda_device_type device_type,
                                int32_t device_index, const kda_options* options);

/* Row `index` of an operation's signature; KDA_INVALID_ARGUMENT past the end. */
KDA_API kda_status kda_tensor_spec_at(kda_operation operation, int32_t index,
                                      kda_tensor_spec* spec);
/* Row `index` of the list of implementations; KDA_INVALID_ARGUMENT past the end. */
KDA_API kda_status kda_implementation_at(int32_t index, kda_implementation* implementation);

/* Number of usable devices of a type; 0 if there are none. */
KDA_API int32_t kda_device_count(kda_device_type device_type);

#ifdef __cplusplus
}
#endif

#endif /* KDA_C_API_H_ */

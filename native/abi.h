/* The C ABI of infinity._native: declarations only. Read by cffi (native/build.py), included by the C++ sources inside extern "C".
 *
 * Every function returns 0 or -errno unless it says otherwise. Nothing here calls Python, nothing is global, and no pointer is
 * kept after a call returns, with one exception: the address inside a task belongs to the queue from submit to completion. */

#pragma once

/* ---- files.cpp: every file operation, behind one table, so that tests can count them and make them fail ---- */

enum {
    INF_FILE_OPEN = 0, INF_FILE_CLOSE, INF_FILE_FALLOCATE, INF_FILE_READ, INF_FILE_WRITE, INF_FILE_DATASYNC, INF_FILE_SYNC,
    INF_FILE_RENAME, INF_FILE_UNLINK, INF_FILE_OPS
};

typedef struct inf_files inf_files;

int inf_files_new(inf_files **files);
void inf_files_free(inf_files *files);
/* What a test makes of a call. */
enum {
    INF_FAULT_ERROR = 1,   /* it is not carried out, and its result is -value */
    INF_FAULT_SHORT,       /* READ, WRITE: it moves `value` bytes at most */
    INF_FAULT_DELAY,       /* it begins `us` microseconds later */
    INF_FAULT_HOLD,        /* READ, WRITE, DATASYNC: it begins when `value` others have ended, or `us` microseconds later */
    INF_FAULT_FLIP,        /* READ, WRITE: the bit `bit` of byte `value` arrives inverted (modulo the bytes moved) */
    INF_FAULT_TEAR,        /* WRITE: only its first `value` bytes reach the file, and it reports success */
    INF_FAULT_LOSE,        /* WRITE, DATASYNC, SYNC: it does nothing, and reports success */
    INF_FAULTS
};
typedef struct inf_fault {
    int32_t kind;          /* INF_FAULT_... */
    uint32_t bit;          /* 0 to 7 */
    uint64_t value, us;    /* `us` at most a minute: nothing hangs */
    uint32_t one_in, seed; /* above 1: only about one call in `one_in`, chosen by call and seed */
} inf_fault;
/* For tests: `times` calls of `op`, from the nth on (counted from 1, from now on), are as `fault` says; the fault set first counts. */
int inf_files_fault(inf_files *files, int op, uint64_t nth, uint64_t times, const inf_fault *fault);
/* Takes all faults of `op` away. */
int inf_files_mend(inf_files *files, int op);
uint64_t inf_files_count(const inf_files *files, int op);

int inf_file_open(inf_files *files, const char *path, int flags, int mode);   /* a descriptor >= 0, or -errno */
int inf_file_close(inf_files *files, int fd);
int inf_file_fallocate(inf_files *files, int fd, uint64_t offset, uint64_t nbytes);
int inf_file_datasync(inf_files *files, int fd);
int inf_file_sync(inf_files *files, int fd);
int inf_file_rename(inf_files *files, const char *from, const char *to);
int inf_file_unlink(inf_files *files, const char *path);
/* Alignment that O_DIRECT asks of memory and of file offsets (statx, kernel 6.1); both 0 where the kernel does not say. */
int inf_file_direct_alignment(int fd, uint32_t *memory_align, uint32_t *offset_align);

/* ---- queue/: tasks that may depend on earlier tasks ---- */

enum { INF_READ = 0, INF_WRITE = 1, INF_FLUSH = 2, INF_KERNEL = 3 };
enum { INF_BACKEND_THREADS = 1, INF_BACKEND_URING = 2, INF_BACKEND_LIBAIO = 3 };
/* Of tasks that are ready, the most urgent goes first. */
enum { INF_DEMAND = 0, INF_WRITE_BACK = 1, INF_PREFETCH = 2, INF_PRIORITIES };

typedef struct inf_task {
    int32_t op;             /* INF_READ ... */
    int32_t fd;             /* READ, WRITE, FLUSH */
    uint64_t offset;        /* READ, WRITE: bytes in the file */
    uint64_t nbytes;        /* READ, WRITE: whole length; the queue splits and continues it */
    uint64_t address;       /* READ, WRITE: memory */
    int32_t kernel;         /* KERNEL: INF_KERNEL_... */
    uint32_t args_nbytes;   /* KERNEL: its arguments, copied at submit */
    uint64_t args_offset;   /* KERNEL: where they start in the batch's `args` (a multiple of 8) */
    uint32_t after_begin;   /* dependencies: after[after_begin ... after_begin + after_count) of the batch */
    uint32_t after_count;
    int32_t priority;       /* INF_DEMAND ... */
    uint32_t unused;
} inf_task;

typedef struct inf_completion {
    uint64_t id;
    uint64_t value;         /* what a kernel answers (a checksum); bytes moved for READ and WRITE */
    int32_t status;         /* 0, or -errno; -ECANCELED when a task it depends on failed */
    uint32_t retries;       /* short transfers continued, EINTR and EAGAIN retried */
} inf_completion;

typedef struct inf_queue_stats {
    uint64_t read_nbytes, write_nbytes;   /* moved by finished requests */
    uint64_t reads, writes, flushes, kernels;   /* finished tasks */
    uint64_t shorts, retries;
    uint64_t in_flight;     /* tasks submitted and not complete */
    uint64_t io_busy_ns;    /* time with at least one READ or WRITE in flight on some path */
} inf_queue_stats;

/* Of one path. */
typedef struct inf_path_stats {
    uint64_t read_nbytes, write_nbytes;
    uint64_t reads, writes, flushes;   /* finished requests */
    uint64_t shorts, retries;
    uint64_t in_flight;                /* requests at the backend */
    uint64_t busy_ns;                  /* time with at least one READ or WRITE there */
} inf_path_stats;

/* Values by bucket: below 16, bucket v has the value v; bucket 16 e + m (e >= 1) has those from (16 + m) 2^(e - 1) up to the next. The
 * last one also has all that is larger. */
enum { INF_HISTOGRAM_BUCKETS = 608 };
typedef struct inf_histogram {
    uint64_t count, total, max;
    uint64_t buckets[INF_HISTOGRAM_BUCKETS];
} inf_histogram;
/* Of a request: from when its task was ready until it was handed to the backend; from then until it was given back; both. */
enum { INF_SUBMISSION = 0, INF_COMPLETION = 1, INF_TOTAL = 2, INF_STAGES };

/* How one path is carried out. */
typedef struct inf_path_info {
    int32_t backend;                    /* INF_BACKEND_... */
    uint32_t depth;                     /* requests at the backend at most; fewer than asked for where the system allows no more */
    uint64_t files_registered;
    uint64_t memory_registered_nbytes;
    char notes[512];                    /* what the backend does without and why, a line each; ends in a 0 */
} inf_path_info;

typedef struct inf_queue inf_queue;

typedef struct inf_queue_options {
    int32_t backend;        /* INF_BACKEND_... */
    uint32_t depth;         /* requests at the backend, of each path */
    uint64_t block_nbytes;  /* the largest request */
    uint64_t in_flight_nbytes;   /* bytes at the backend, of each path; one request always may go */
    uint32_t workers;       /* kernel threads (>= 1) */
    uint32_t io_threads;    /* of the threads backend, of each path */
    uint32_t n_paths;       /* 1 ... INF_PATHS_MAX */
} inf_queue_options;

enum { INF_PATHS_MAX = 16 };

/* A backend that does not work here gives the errno of what it lacks. */
int inf_queue_open(inf_files *files, const inf_queue_options *options, inf_queue **queue);
int inf_queue_backend(const inf_queue *queue);   /* INF_BACKEND_... */
/* Waits until all in flight are complete, joins every thread. */
void inf_queue_close(inf_queue *queue);

/* Transfers of `fd` submitted from now on go to `path` (those of a descriptor that was not added: to path 0), and its backend may
 * register the file. */
int inf_queue_add_file(inf_queue *queue, int fd, uint32_t path);
/* Before `fd` is closed, with nothing of it in flight: when this returns, the kernel has let go of a registered file. A descriptor
 * that was not added is fine. */
int inf_queue_drop_file(inf_queue *queue, int fd);
/* Transfers will use this memory: the backends may register it. */
int inf_queue_add_memory(inf_queue *queue, void *base, uint64_t nbytes);
/* Before it is unmapped, with nothing in flight there. */
int inf_queue_drop_memory(inf_queue *queue, void *base);

/* All or nothing. Task i gets id *first_id + i; ids grow and start at 1. after[j] >= 1 is the id of an earlier task (one already
 * complete is fine); after[j] < 0 is task -1 - after[j] of this batch, which must come before. */
int inf_queue_submit(inf_queue *queue, const inf_task *tasks, uint32_t n_tasks, const int64_t *after, uint32_t n_after,
                     const uint8_t *args, uint64_t args_nbytes, uint64_t *first_id);
/* Takes up to `max` completions, in the order of completion; returns how many. Each is given exactly once. */
int inf_queue_poll(inf_queue *queue, inf_completion *completions, uint32_t max);
/* Until every one of `ids` is complete (taken by poll or not): 0, or -ETIMEDOUT after timeout_ms. They and everything that they
 * depend on become INF_DEMAND, unless timeout_ms is 0. */
int inf_queue_wait(inf_queue *queue, const uint64_t *ids, uint32_t n_ids, uint32_t timeout_ms);
/* The same until at least one of them is complete (0 ids: at once). */
int inf_queue_wait_any(inf_queue *queue, const uint64_t *ids, uint32_t n_ids, uint32_t timeout_ms);
/* The tasks of `ids` that are not complete, and everything that they depend on, become INF_DEMAND. */
int inf_queue_promote(inf_queue *queue, const uint64_t *ids, uint32_t n_ids);
/* Tasks not begun end with -ECANCELED, those that depend on others when these have ended; of transfers begun no further request is
 * handed over; a kernel that runs goes on. No ids: all tasks. Ids that are complete or unknown are fine. */
int inf_queue_cancel(inf_queue *queue, const uint64_t *ids, uint32_t n_ids);
/* From now on submit is -ESHUTDOWN. Waits until nothing is in flight: 0, or -ETIMEDOUT after timeout_ms. */
int inf_queue_drain(inf_queue *queue, uint32_t timeout_ms);
/* The ids of up to `max` tasks not complete, oldest first; returns how many. */
int inf_queue_list(const inf_queue *queue, uint64_t *ids, uint32_t max);
enum { INF_WAITING = 0, INF_READY = 1, INF_RUNNING = 2 };
/* What task `id` is (`after_count`: dependencies still missing) and how far it is, or -ENOENT when it is complete or unknown. */
int inf_queue_pending(const inf_queue *queue, uint64_t id, inf_task *task, int *phase);
int inf_queue_get_stats(const inf_queue *queue, inf_queue_stats *stats);
int inf_queue_get_path_stats(const inf_queue *queue, uint32_t path, inf_path_stats *stats);
/* Nanoseconds of each request of `op` (INF_READ or INF_WRITE) on one path. */
int inf_queue_get_latency(const inf_queue *queue, uint32_t path, int op, int stage, inf_histogram *histogram);
/* Requests at the backend of one path, each time that one more was handed to it, that one included. */
int inf_queue_get_depths(const inf_queue *queue, uint32_t path, inf_histogram *histogram);
int inf_queue_get_path_info(const inf_queue *queue, uint32_t path, inf_path_info *info);

/* ---- checksum.cpp ---- */

uint32_t inf_crc32c(const void *data, uint64_t nbytes, uint32_t seed);         /* best version of this machine */
uint32_t inf_crc32c_table(const void *data, uint64_t nbytes, uint32_t seed);   /* reference; same answer */
enum { INF_CRC_TABLE = 0, INF_CRC_SSE42, INF_CRC_AVX512, INF_CRC_VERSIONS };
/* By one version; all give the same. -EINVAL if unknown, -EOPNOTSUPP if this machine lacks it. */
int inf_crc32c_by(int version, const void *data, uint64_t nbytes, uint32_t seed, uint32_t *crc);

/* ---- kernels/: what a KERNEL task runs on a worker. Each has a struct of arguments, passed as bytes ---- */

enum {
    INF_KERNEL_COPY = 0,      /* inf_copy_args, checks */
    INF_KERNEL_CHECKSUM,      /* inf_checksum_args: value = crc32c */
    INF_KERNEL_VERIFY,        /* inf_checksum_args: value = crc32c; -EBADMSG if it is not `expected` */
    INF_KERNEL_ADAMW,         /* inf_adamw_args, its segments, checks */
    INF_KERNEL_ACCUMULATE,    /* inf_accumulate_args, its segments, checks: fp32 running sums of gradients */
    INF_KERNEL_SUMSQ,         /* inf_sumsq_args, its segments, checks: fp64 sums of squares, one per run */
    INF_KERNEL_SPLIT,         /* inf_split_args: fp32 -> 16 + 16 */
    INF_KERNEL_JOIN,          /* inf_split_args: 16 + 16 -> fp32 */
    INF_KERNEL_SLEEP,         /* inf_sleep_args: for tests of order and overlap */
    INF_KERNELS
};

/* Up to INF_CHECKS_MAX checks may follow the arguments of the kernels that say so: checksums of the pages they read or write, taken
 * piece by piece while the kernel has the piece in cache. A page that is not what BEFORE expects ends the kernel with -EBADMSG and the
 * value tag << 32 | the crc32c found; what it wrote until then is worth nothing. AFTER stores the crc32c of the page as the kernel
 * leaves it. Bytes of the page that the kernel does not touch count as well. Pages do not overlap. With AFTER a kernel works on
 * ascending addresses of the page: -EINVAL where its segments do not; with BEFORE alone that is only quicker. */
enum { INF_CHECK_BEFORE = 1, INF_CHECK_AFTER = 2 };
enum { INF_CHECKS_MAX = 16 };
typedef struct inf_check {
    uint64_t address, nbytes;   /* the used bytes of a page */
    uint64_t result;            /* AFTER: address of a uint32_t; written only if the kernel ends well */
    uint32_t expected;          /* BEFORE */
    uint32_t flags;             /* INF_CHECK_... */
    uint32_t tag, unused;
} inf_check;

enum { INF_F32 = 0, INF_BF16 = 1 };

/* The ranges may overlap, if there are no checks. */
typedef struct inf_copy_args { uint64_t to, from, nbytes; } inf_copy_args;
typedef struct inf_checksum_args { uint64_t address, nbytes; uint32_t expected, unused; } inf_checksum_args;
typedef struct inf_sleep_args { uint64_t microseconds; int32_t status; uint32_t value; } inf_sleep_args;   /* then ends with `status` */
/* `numel` elements; fp32 at `master`, int16 hi and lo planes. */
typedef struct inf_split_args { uint64_t master, param, residual, numel; } inf_split_args;

/* Scalars of one parameter group at one step count: computed in double by the caller, cast once. */
typedef struct inf_adamw_scalars {
    float grad_factor;     /* g is rounded to g * grad_factor first; 1 means no multiplication */
    float decay;           /* 1 - lr * weight_decay */
    float weight;          /* 1 - beta1 */
    float beta2;
    float one_minus_beta2;
    float step_scale;      /* -lr / (1 - beta1^step) */
    float bias_scale;      /* sqrt(1 - beta2^step) */
    float eps;
} inf_adamw_scalars;

/* The part [begin, end) of the tile, in elements; `grad` is the address of the gradient of element `begin`. */
typedef struct inf_adamw_segment {
    uint64_t grad;
    uint32_t begin, end;
    int32_t grad_format;   /* INF_F32 or INF_BF16 */
    uint32_t unused;
    inf_adamw_scalars scalars;
} inf_adamw_segment;

/* Addresses of the tile's planes, one run of elements each. `residual` 0: `param` is fp32; else the 16 + 16 split.
 * A moment is given as up to two pieces, because a tile may be two pages of it: element e is in piece e / exp_piece_numel. */
typedef struct inf_adamw_args {
    uint64_t param, residual;
    uint64_t exp_avg[2], exp_avg_sq[2];
    uint64_t exp_piece_numel;
    uint32_t n_segments, variant;   /* variant: INF_SIMD_... */
} inf_adamw_args;

enum { INF_SIMD_AUTO = 0, INF_SIMD_SCALAR = 1, INF_SIMD_AVX2 = 2 };

/* to[i] = from[i] as fp32 (add 0) or to[i] + from[i] (add 1). */
typedef struct inf_accumulate_segment { uint64_t to, from, numel; int32_t from_format; uint32_t add; } inf_accumulate_segment;
typedef struct inf_accumulate_args { uint32_t n_segments, variant; } inf_accumulate_args;

/* Runs of 1,024 elements from `from` on (the last may be shorter): sums[r] = sum of squares in fp64: lane i of 8 takes the elements
 * i mod 8 in order, then ((0+4)+(2+6)) + ((1+5)+(3+7)). */
typedef struct inf_sumsq_segment { uint64_t from, sums, numel; int32_t from_format; uint32_t unused; } inf_sumsq_segment;
typedef struct inf_sumsq_args { uint32_t n_segments, variant; } inf_sumsq_args;

/* Runs a kernel here and now, on the calling thread (tests, start-up); what a KERNEL task would do. */
int inf_kernel_run(int kernel, const void *args, uint32_t args_nbytes, uint64_t *value);
int inf_simd_best(void);   /* INF_SIMD_... that AUTO takes on this machine */

/* ---- memory.cpp: the arena of frames, and the device ranges of the CPU ---- */

/* Anonymous memory of exactly nbytes (rounded up to a page), 2 MiB aligned, huge pages advised, MADV_DONTFORK; `lock` also mlocks
 * it: -ENOMEM or -EPERM when the limit forbids it, nothing allocated. */
int inf_arena_open(uint64_t nbytes, int lock, void **base);
int inf_arena_close(void *base, uint64_t nbytes);

typedef struct inf_pool inf_pool;
/* A budget of `capacity_nbytes` (multiple of 2 MiB) of physical memory, and address ranges it is moved behind with mremap. */
int inf_pool_open(uint64_t capacity_nbytes, inf_pool **pool);
/* Ranges that are still open stay valid, full or drained, until each is closed; `pool` is freed with the last. */
void inf_pool_close(inf_pool *pool);
/* Reserves an address range (PROT_NONE) of nbytes, a multiple of 2 MiB. */
int inf_range_open(inf_pool *pool, uint64_t nbytes, void **base);
int inf_range_close(inf_pool *pool, void *base);
/* Puts memory behind the range (content undefined): -ENOMEM when the pool has too little left. */
int inf_range_fill(inf_pool *pool, void *base);
/* Takes it away again; a touch then faults. */
int inf_range_drain(inf_pool *pool, void *base);
uint64_t inf_pool_free_nbytes(const inf_pool *pool);
/* The most physical memory that the pool may hold now, in ranges and free. */
uint64_t inf_pool_warm_nbytes(const inf_pool *pool);
/* Gives free memory back to the kernel until that is at most warm_nbytes, or nothing free is left to give. */
int inf_pool_trim(inf_pool *pool, uint64_t warm_nbytes);

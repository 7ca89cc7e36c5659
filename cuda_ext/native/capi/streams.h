/* Streams of the CPU device: each is one native thread that does what was submitted, in order, and never takes Python's lock. */
#ifndef HICACHE_CAPI_STREAMS_H
#define HICACHE_CAPI_STREAMS_H

struct hic_stream;
struct hic_faults;

enum hic_op_kind {
  HIC_OP_CALL = 0,     /* work: call(argument) on the stream's thread; 0 or more is success */
  HIC_OP_EXTERNAL = 1, /* work: done by whoever waits in hic_stream_next, which is told `argument` */
  HIC_OP_WAIT = 2,     /* go on when `event` has ended `generation`, well or badly */
  HIC_OP_RECORD = 3,   /* end `event`: everything before it has ended */
};

/* One step of a submission.  Work (CALL, EXTERNAL) stands before the gate, can be told to fail, and lasts as long as the
 * stream's speed says; then `event`, if there is one, ends with its code. */
struct hic_op {
  int32_t kind;
  int32_t unused;
  uint64_t bytes;              /* that the work moves */
  int32_t (*call)(void *);     /* never Python */
  uint64_t argument;           /* a pointer for `call`, a number for whoever does EXTERNAL work */
  void (*release)(void *);     /* if not null: called with `argument` once, when the work has ended or will never begin */
  struct hic_event *event;     /* may be null */
  uint64_t generation;
};

/* The argument of hic_call_copies. */
struct hic_copies {
  uint64_t plans; /* address of struct hic_plan[count] */
  uint32_t count;
  uint32_t threads; /* for each of them */
  int32_t engine;   /* hic_engine */
  int32_t to_host;
};

struct hic_stream_counts {
  uint64_t submitted; /* pieces of work */
  uint64_t finished;  /* pieces of work that went well */
  uint64_t failed;    /* pieces of work that failed, and all that was dropped */
  uint64_t dropped;
  uint64_t moved_bytes;
  uint64_t passed;     /* ops that are over for good: their memory is no longer touched */
  int64_t running_ns;  /* how long the present work has lasted; 0 if none runs */
  int32_t exited;      /* 1 if no thread runs any more */
  int32_t broken;      /* the code given to hic_stream_break */
  int32_t calling;     /* 1 while native work runs: its memory is touched */
  int32_t unused;
};

/* Planned failures, shared by the streams of a device. */
HIC_API struct hic_faults *hic_faults_new(void);
/* Fail `works` pieces of work with `code` instead of doing them, once `after` others have passed; of the stream of that number, or
 * of any (< 0). */
HIC_API void hic_faults_add(struct hic_faults *faults, int32_t code, uint32_t works, uint32_t after, int32_t stream);
HIC_API void hic_faults_release(struct hic_faults *faults);

/* The thread starts with the first submission.  `name` is what the operating system shows of it, 15 characters. */
HIC_API int32_t hic_stream_new(const char *name, int32_t number, struct hic_faults *faults, struct hic_stream **out);
/* A whole operation in one call: all ops in order, then `whole` (may be null) ends with the first code that is not 0.  A piece
 * of work that fails ends the events of those behind it in the same call at once, with its code; they run all the same.
 * Never blocks -> how many ops were ever submitted.  HIC_CLOSED after hic_stream_finish: nothing was taken then. */
HIC_API int64_t hic_stream_submit(struct hic_stream *stream, const struct hic_op *ops, uint32_t count,
                                  struct hic_event *whole, uint64_t generation);
/* From now on a piece of work lasts at least latency_ns + bytes * ns_per_byte. */
HIC_API void hic_stream_speed(struct hic_stream *stream, int64_t latency_ns, double ns_per_byte);

/* The gate stands before each piece of work.  `reached` ends when work stands before the shut gate. */
HIC_API void hic_stream_gate_shut(struct hic_stream *stream, struct hic_event *reached, uint64_t generation);
/* Let `works` pass the shut gate -> 1 if `fresh` takes the place of a `reached` that had ended, else 0; HIC_INVALID if it is open. */
HIC_API int32_t hic_stream_gate_allow(struct hic_stream *stream, uint32_t works, struct hic_event *fresh, uint64_t generation);
HIC_API void hic_stream_gate_open(struct hic_stream *stream);

/* Blocks whoever does the EXTERNAL work -> 1 with its argument, 0 after `timeout_ns`, HIC_CLOSED when no more will come. */
HIC_API int32_t hic_stream_next(struct hic_stream *stream, int64_t timeout_ns, uint64_t *argument);
/* The EXTERNAL work has ended. */
HIC_API void hic_stream_end(struct hic_stream *stream, int32_t code);

/* Take nothing more; the thread ends when all is done. */
HIC_API void hic_stream_finish(struct hic_stream *stream);
/* Blocks -> HIC_OK when the thread has ended after hic_stream_finish, HIC_TIMEOUT else. */
HIC_API int32_t hic_stream_join(struct hic_stream *stream, int64_t timeout_ns);
/* End everything that has not ended with `code` (not 0), and whatever is submitted later; work that runs now runs on unseen. */
HIC_API void hic_stream_drop(struct hic_stream *stream, int32_t code);
/* As when a GPU's context dies: from now on nothing is done and nothing is told, until hic_stream_drop. */
HIC_API void hic_stream_break(struct hic_stream *stream, int32_t code);
HIC_API void hic_stream_count(struct hic_stream *stream, struct hic_stream_counts *out);
/* Why the last CALL failed that did so with a negative code, in words -> `out`, cut to `room` bytes. */
HIC_API void hic_stream_error(struct hic_stream *stream, char *out, uint32_t room);
/* Let go of it: what has not begun is dropped, its thread ends when it can. */
HIC_API void hic_stream_release(struct hic_stream *stream);

/* Host functions, for HIC_OP_CALL.  Run the plans of the struct hic_copies at `argument`, one after the other. */
HIC_API int32_t hic_call_copies(void *argument);
/* Sleep for `argument` nanoseconds. */
HIC_API int32_t hic_call_nap(void *argument);
/* Write the monotonic clock, in nanoseconds, to the int64_t at `argument`. */
HIC_API int32_t hic_call_stamp(void *argument);

#endif

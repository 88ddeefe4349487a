/* Events: points in the work of a stream that others can wait for. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

/* One recording. Whoever waits holds on to the one that he means: recording the event again
   changes neither when it is reached nor at which time of the model. */
typedef struct Mark {
  Object object;
  pthread_mutex_t lock;
  pthread_cond_t reached;
  _Atomic bool is_reached;
  int64_t cycles;
  gcuError error;                     /* of the stream, then */
  char message[400];
} Mark;

typedef struct Event {
  Object object;
  pthread_mutex_t lock;
  Mark *latest;                       /* NULL: never recorded */
} Event;

typedef struct MarkOperation { Operation operation; Mark *mark; } MarkOperation;

static void destroy_mark(Object *object) {
  Mark *mark = (Mark *)object;
  pthread_mutex_destroy(&mark->lock);
  pthread_cond_destroy(&mark->reached);
  free(mark);
}

static Mark *make_mark(void) {
  Mark *mark = calloc(1, sizeof *mark);
  if (!mark) return NULL;
  mark->object.references = 1;
  mark->object.destroy = destroy_mark;
  pthread_mutex_init(&mark->lock, NULL);
  pthread_cond_init(&mark->reached, NULL);
  return mark;
}

static void wait_for_mark(Mark *mark) {
  for (int turn = 0; turn < spin_turns; turn++) {
    if (atomic_load_explicit(&mark->is_reached, memory_order_acquire)) return;
    relax(turn);
  }
  pthread_mutex_lock(&mark->lock);
  while (!mark->is_reached) pthread_cond_wait(&mark->reached, &mark->lock);
  pthread_mutex_unlock(&mark->lock);
}

static void drop_mark_operation(Operation *operation) {
  let_go(((MarkOperation *)operation)->mark);
  free(operation);
}

static void run_record(Operation *operation, Stream *stream) {
  Mark *mark = ((MarkOperation *)operation)->mark;
  pthread_mutex_lock(&mark->lock);
  mark->cycles = stream->cycles;
  mark->error = stream->error;
  if (mark->error) memcpy(mark->message, stream->message, sizeof mark->message);
  atomic_store_explicit(&mark->is_reached, true, memory_order_release);
  pthread_cond_broadcast(&mark->reached);
  pthread_mutex_unlock(&mark->lock);
}

static void run_wait(Operation *operation, Stream *stream) {
  Mark *mark = ((MarkOperation *)operation)->mark;
  wait_for_mark(mark);
  if (mark->cycles > stream->cycles) stream->cycles = mark->cycles;
  /* What comes after it would work on what the other stream did not do. */
  if (mark->error) fail_stream(stream, mark->error, "%s", mark->message);
}

static gcuError submit_mark(Stream *stream, Mark *mark, bool records) {
  MarkOperation *made = malloc(sizeof *made);
  if (!made) return out_of_host_memory(sizeof *made);
  keep(mark);
  *made = (MarkOperation){{.run = records ? run_record : run_wait, .drop = drop_mark_operation,
                           .always = records}, mark};
  return submit(stream, &made->operation);
}

/* ---------------------------------------------------------------- what users call */

static void destroy_event(Object *object) {
  Event *event = (Event *)object;
  if (event->latest) let_go(event->latest);
  pthread_mutex_destroy(&event->lock);
  free(event);
}

gcuError gcuEventCreate(gcuEvent_t *handle) {
  gcuError error = claim();
  if (error) return error;
  if (!handle) return fail(gcuErrorInvalidValue, "gcuEventCreate to NULL");
  Event *event = calloc(1, sizeof *event);
  if (!event) return out_of_host_memory(sizeof *event);
  event->object.references = 1;
  event->object.destroy = destroy_event;
  pthread_mutex_init(&event->lock, NULL);
  void *opened = open_handle(AN_EVENT, &event->object);
  if (!opened) {
    let_go(event);
    return fail(gcuErrorOutOfMemory, "there is no room for another event");
  }
  *handle = opened;
  return gcuSuccess;
}

gcuError gcuEventDestroy(gcuEvent_t handle) {
  gcuError error = ready();
  if (error) return error;
  Event *event = close_handle(AN_EVENT, handle);
  if (!event) return stale(AN_EVENT, handle);
  let_go(event);
  return gcuSuccess;
}

/* The latest recording of an event, with a reference; NULL: there is none. */
static gcuError find_mark(gcuEvent_t handle, Mark **mark) {
  gcuError error = ready();
  if (error) return error;
  Event *event = object_of(AN_EVENT, handle);
  if (!event) return stale(AN_EVENT, handle);
  pthread_mutex_lock(&event->lock);
  *mark = event->latest;
  if (*mark) keep(*mark);
  pthread_mutex_unlock(&event->lock);
  let_go(event);
  return gcuSuccess;
}

static gcuError record(Event *event, Stream *stream) {
  Mark *mark = make_mark();
  if (!mark) return out_of_host_memory(sizeof *mark);
  pthread_mutex_lock(&event->lock);
  gcuError error = submit_mark(stream, mark, true);
  Mark *old = event->latest;
  if (!error) event->latest = mark;
  pthread_mutex_unlock(&event->lock);
  if (error) let_go(mark);
  else if (old) let_go(old);
  return error;
}

gcuError gcuEventRecord(gcuEvent_t handle, gcuStream_t stream_handle) {
  Stream *stream;
  gcuError error = find_stream(stream_handle, &stream);
  if (error) return error;
  Event *event = object_of(AN_EVENT, handle);
  if (event) {
    error = record(event, stream);
    let_go(event);
  } else {
    error = stale(AN_EVENT, handle);
  }
  let_go(stream);
  return error;
}

gcuError gcuStreamWaitEvent(gcuStream_t stream_handle, gcuEvent_t handle) {
  Stream *stream;
  gcuError error = find_stream(stream_handle, &stream);
  if (error) return error;
  Mark *mark = NULL;
  error = find_mark(handle, &mark);
  if (mark) {
    error = submit_mark(stream, mark, false);
    let_go(mark);
  }
  let_go(stream);
  return error;
}

static gcuError mark_error(const Mark *mark) {
  return mark->error ? fail(mark->error, "%s", mark->message) : gcuSuccess;
}

gcuError gcuEventQuery(gcuEvent_t handle) {
  Mark *mark = NULL;
  gcuError error = find_mark(handle, &mark);
  if (!mark) return error;
  bool reached = atomic_load_explicit(&mark->is_reached, memory_order_acquire);
  error = reached ? mark_error(mark) : gcuErrorNotReady;
  let_go(mark);
  return error;
}

gcuError gcuEventSynchronize(gcuEvent_t handle) {
  Mark *mark = NULL;
  gcuError error = may_wait("gcuEventSynchronize");
  if (!error) error = find_mark(handle, &mark);
  if (!mark) return error;
  wait_for_mark(mark);
  error = mark_error(mark);
  let_go(mark);
  return error;
}

/* The modelled time of a recording that was reached. */
static gcuError time_of(gcuEvent_t handle, const char *which, int64_t *cycles) {
  Mark *mark = NULL;
  gcuError error = find_mark(handle, &mark);
  if (error) return error;
  if (!mark) return fail(gcuErrorInvalidValue, "the %s event was never recorded", which);
  if (!atomic_load_explicit(&mark->is_reached, memory_order_acquire)) error = gcuErrorNotReady;
  else error = mark_error(mark);
  *cycles = error ? 0 : mark->cycles;
  let_go(mark);
  return error;
}

gcuError gcuEventElapsedCycles(int64_t *cycles, gcuEvent_t start, gcuEvent_t end) {
  int64_t first, last;
  gcuError error = time_of(start, "first", &first);
  if (!error) error = time_of(end, "second", &last);
  if (error) return error;
  if (!cycles) return fail(gcuErrorInvalidValue, "gcuEventElapsedCycles to NULL");
  *cycles = last - first;
  return gcuSuccess;
}

gcuError gcuEventElapsedTime(float *milliseconds, gcuEvent_t start, gcuEvent_t end) {
  int64_t cycles;
  gcuError error = gcuEventElapsedCycles(&cycles, start, end);
  if (error) return error;
  if (!milliseconds) return fail(gcuErrorInvalidValue, "gcuEventElapsedTime to NULL");
  *milliseconds = (float)((double)cycles / (double)chip.clock_khz);
  return gcuSuccess;
}

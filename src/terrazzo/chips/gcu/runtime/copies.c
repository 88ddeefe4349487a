/* Copies and fills, at once or in the order of a stream. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

/* Memory of the host that is not pinned may change as soon as a call returns: so much of it is
   taken along, and for more the caller waits. */
#define TAKEN_ALONG ((size_t)64 << 10)

typedef struct Outcome { gcuError error; char message[200]; } Outcome;

typedef struct Copy {
  Operation operation;
  bool is_fill;
  int value;                          /* of a fill */
  const char *name;
  void *target;
  const void *source;
  size_t size;
  int64_t cycles, correlation, tag;
  Outcome *outcome;                   /* of a call that waits; else the stream fails */
  unsigned char taken[];
} Copy;

/* ---------------------------------------------------------------- how long they take */

static int64_t per_cycle(size_t bytes, int64_t rate) {
  return rate > 0 ? (int64_t)((bytes + (size_t)rate - 1) / (size_t)rate) : 0;
}

/* To or from the host or another device: the link. Within one: each byte is read and written. */
static int64_t copy_cycles(size_t size, bool over_the_link) {
  if (over_the_link) return chip.link_latency + per_cycle(size, chip.link_bytes_per_cycle);
  return chip.dma_latency + per_cycle(2 * size, chip.memory_bytes_per_cycle);
}

static int64_t fill_cycles(size_t size) {
  return chip.dma_latency + per_cycle(size, chip.memory_bytes_per_cycle);
}

/* ---------------------------------------------------------------- running them */

static void move(const Copy *copy) {
  if (copy->is_fill) memset(copy->target, copy->value, copy->size);
  else memmove(copy->target, copy->source, copy->size);
}

static void report(Copy *copy, Stream *stream, const Guard *guard) {
  char text[80];
  fault_text(guard->signal, guard->address, text, sizeof text);
  if (!copy->outcome) {
    fail_stream(stream, gcuErrorIllegalAddress, "a %s of %zu bytes from %p to %p %s", copy->name,
                copy->size, copy->source, copy->target, text);
    return;
  }
  copy->outcome->error = gcuErrorInvalidPointer;
  strcpy(copy->outcome->message, text);
}

static void run_copy(Operation *operation, Stream *stream) {
  Copy *copy = (Copy *)operation;
  Guard guard;
  if (sigsetjmp(guard.jump, 0)) {
    report(copy, stream, &guard);
    return;
  }
  enter(&guard);
  move(copy);
  leave(&guard);
  if (is_tracing()) {
    gcuRecord record = {.kind = copy->is_fill ? gcuRecordSet : gcuRecordCopy,
                        .device = stream->device->number, .stream = stream->number,
                        .start = stream->cycles, .cycles = copy->cycles,
                        .bytes = (int64_t)copy->size, .correlation = copy->correlation,
                        .tag = copy->tag};
    trace(&record, copy->name);
  }
  advance(stream, copy->cycles);
}

static void drop_copy(Operation *operation) { free(operation); }

static gcuError start(Copy plan, bool takes_along, bool waits, Stream *stream) {
  size_t extra = takes_along ? plan.size : 0;
  Copy *copy = malloc(sizeof plan + extra);
  if (!copy) return out_of_host_memory(sizeof plan + extra);
  *copy = plan;
  copy->operation = (Operation){.run = run_copy, .drop = drop_copy};
  copy->correlation = next_correlation();
  copy->tag = current_tag();
  if (takes_along) {
    Guard guard;
    if (sigsetjmp(guard.jump, 0)) {
      free(copy);
      return fail(gcuErrorInvalidPointer, "the %zu bytes at %p cannot be read", plan.size,
                  plan.source);
    }
    enter(&guard);
    memcpy(copy->taken, plan.source, plan.size);
    leave(&guard);
    copy->source = copy->taken;
  }
  if (!waits) return submit(stream, &copy->operation);
  Outcome outcome = {gcuSuccess, ""};
  copy->outcome = &outcome;
  gcuError error = submit_and_wait(stream, &copy->operation);
  if (!error && outcome.error)
    error = fail(outcome.error, "a %s of %zu bytes from %p to %p %s", plan.name, plan.size,
                 plan.source, plan.target, outcome.message);
  return error;
}

/* ---------------------------------------------------------------- where pointers must lie */

static bool is_device(const Place *place) { return place->device != HOST; }

static const char *side(bool device) { return device ? "the device" : "the host"; }

static gcuError on_its_side(const void *pointer, bool device, const char *what, const char *kind) {
  Place place = place_of(pointer, 1);
  if (is_device(&place) == device) return gcuSuccess;
  return fail(gcuErrorInvalidDirection, "%s: the %s %p is memory of %s, not of %s", kind, what,
              pointer, side(!device), side(device));
}

/* A pointer of a copy by gcuMemcpyDefault: of the host, or live on whichever device it is of. */
static gcuError live_anywhere(const void *pointer, size_t size, const char *what) {
  Place place = place_of(pointer, size);
  return is_device(&place) && !place.live ? live_on(place.device, pointer, size, what) : gcuSuccess;
}

static gcuError check_copy(const void *target, const void *source, size_t size, gcuMemcpyKind kind,
                           int device) {
  static const struct { const char *name; bool to_device, from_device; } kinds[] = {
    [gcuMemcpyHostToHost] = {"gcuMemcpyHostToHost", false, false},
    [gcuMemcpyHostToDevice] = {"gcuMemcpyHostToDevice", true, false},
    [gcuMemcpyDeviceToHost] = {"gcuMemcpyDeviceToHost", false, true},
    [gcuMemcpyDeviceToDevice] = {"gcuMemcpyDeviceToDevice", true, true},
  };
  if ((unsigned)kind > gcuMemcpyDefault)
    return fail(gcuErrorInvalidValue, "there is no kind %d of copies", (int)kind);
  if (!target || !source)
    return fail(gcuErrorInvalidPointer, "a copy of %zu bytes from %p to %p", size, source, target);
  gcuError error;
  if (kind == gcuMemcpyDefault) {
    error = live_anywhere(target, size, "target");
    return error ? error : live_anywhere(source, size, "source");
  }
  bool to_device = kinds[kind].to_device, from_device = kinds[kind].from_device;
  error = on_its_side(target, to_device, "target", kinds[kind].name);
  if (!error) error = on_its_side(source, from_device, "source", kinds[kind].name);
  if (error) return error;
  int there = place_of(target, 1).device, here = place_of(source, 1).device;
  if (to_device && from_device && there != here && there >= 0 && here >= 0)
    return fail(gcuErrorPeerAccess, "%s: the source is memory of device %d, the target of device "
                "%d; gcuMemcpyPeer copies between devices", kinds[kind].name, here, there);
  if (to_device) error = live_on(device, target, size, "target");
  if (!error && from_device) error = live_on(device, source, size, "source");
  return error;
}

static bool crosses_link(const void *target, const void *source) {
  Place there = place_of(target, 1), here = place_of(source, 1);
  return there.device != here.device;
}

static gcuError copy_on(Stream *stream, void *target, const void *source, size_t size,
                        bool asynchronous) {
  bool link = crosses_link(target, source);
  Copy plan = {.name = "copy", .target = target, .source = source, .size = size,
               .cycles = copy_cycles(size, link)};
  bool loose_source = place_of(source, 1).device == HOST && !is_pinned(source, size);
  bool loose_target = place_of(target, 1).device == HOST && !is_pinned(target, size);
  bool takes_along = asynchronous && loose_source && !loose_target && size <= TAKEN_ALONG;
  bool waits = !asynchronous || loose_target || (loose_source && !takes_along);
  gcuError error = waits ? may_wait("a copy of memory that is not pinned") : gcuSuccess;
  return error ? error : start(plan, takes_along, waits, stream);
}

/* ---------------------------------------------------------------- what users call */

static gcuError copy(void *target, const void *source, size_t size, gcuMemcpyKind kind,
                     gcuStream_t handle, bool asynchronous) {
  Stream *stream;
  gcuError error = find_stream(handle, &stream);
  if (error) return error;
  if (size) error = check_copy(target, source, size, kind, stream->device->number);
  if (!error && size) error = copy_on(stream, target, source, size, asynchronous);
  else if (!error && !asynchronous) error = wait_for(stream);
  let_go(stream);
  return error;
}

gcuError gcuMemcpy(void *target, const void *source, size_t size, gcuMemcpyKind kind) {
  gcuError error = may_wait("gcuMemcpy");
  return error ? error : copy(target, source, size, kind, NULL, false);
}

gcuError gcuMemcpyAsync(void *target, const void *source, size_t size, gcuMemcpyKind kind,
                        gcuStream_t stream) {
  return copy(target, source, size, kind, stream, true);
}

static gcuError peer_copy(void *target, int target_device, const void *source, int source_device,
                          size_t size, gcuStream_t handle, bool asynchronous) {
  Stream *stream;
  gcuError error = known_device(target_device);
  if (!error) error = known_device(source_device);
  if (!error) error = find_stream(handle, &stream);
  if (error) return error;
  if (size) error = live_on(target_device, target, size, "target");
  if (!error && size) error = live_on(source_device, source, size, "source");
  if (!error && size) error = copy_on(stream, target, source, size, asynchronous);
  let_go(stream);
  return error;
}

gcuError gcuMemcpyPeer(void *target, int target_device, const void *source, int source_device,
                       size_t size) {
  gcuError error = ready();
  if (!error) error = may_wait("gcuMemcpyPeer");
  /* What the other device still does may write what is read, or read what is written. */
  if (!error) error = known_device(source_device);
  if (!error) error = known_device(target_device);
  if (!error) error = wait_for(devices[source_device].default_stream);
  if (!error) error = wait_for(devices[target_device].default_stream);
  if (error) return error;
  return peer_copy(target, target_device, source, source_device, size, NULL, false);
}

gcuError gcuMemcpyPeerAsync(void *target, int target_device, const void *source, int source_device,
                            size_t size, gcuStream_t stream) {
  return peer_copy(target, target_device, source, source_device, size, stream, true);
}

static gcuError fill(void *pointer, int value, size_t size, gcuStream_t handle, bool waits) {
  Stream *stream;
  gcuError error = find_stream(handle, &stream);
  if (error) return error;
  if (size) error = live_on(stream->device->number, pointer, size, "target");
  Copy plan = {.is_fill = true, .value = value, .name = "fill", .target = pointer, .size = size,
               .cycles = fill_cycles(size)};
  if (!error && size) error = start(plan, false, waits, stream);
  let_go(stream);
  return error;
}

gcuError gcuMemset(void *pointer, int value, size_t size) {
  gcuError error = may_wait("gcuMemset");
  return error ? error : fill(pointer, value, size, NULL, true);
}

gcuError gcuMemsetAsync(void *pointer, int value, size_t size, gcuStream_t stream) {
  return fill(pointer, value, size, stream, false);
}

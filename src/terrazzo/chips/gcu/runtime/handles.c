/* Handles are numbers: a place in a table, and how often that place was used before. So a handle
   that was closed is recognised for good, and whatever a user passes is never followed. */
#include "internal.h"

#include <stdlib.h>

typedef struct Slot { Object *object; uint64_t uses; uint32_t next_free; uint32_t kind; } Slot;

enum { KIND_BITS = 3, PLACE_BITS = 24 };
#define MOST_SLOTS ((uint32_t)1 << PLACE_BITS)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Slot *slots;
static uint32_t slot_count, slot_room, first_free = UINT32_MAX;

void keep(void *object) {
  atomic_fetch_add_explicit(&((Object *)object)->references, 1, memory_order_relaxed);
}

void let_go(void *pointer) {
  Object *object = pointer;
  if (atomic_fetch_sub_explicit(&object->references, 1, memory_order_acq_rel) == 1)
    object->destroy(object);
}

static uint32_t take_slot(void) {
  if (first_free != UINT32_MAX) {
    uint32_t place = first_free;
    first_free = slots[place].next_free;
    return place;
  }
  if (slot_count == slot_room) {
    uint32_t room = slot_room ? 2 * slot_room : 64;
    Slot *larger = room <= MOST_SLOTS ? realloc(slots, room * sizeof *slots) : NULL;
    if (!larger) return UINT32_MAX;
    slots = larger, slot_room = room;
  }
  slots[slot_count] = (Slot){.uses = 0};
  return slot_count++;
}

void *open_handle(Kind kind, Object *object) {
  pthread_mutex_lock(&lock);
  uint32_t place = take_slot();
  uintptr_t handle = 0;
  if (place != UINT32_MAX) {
    Slot *slot = &slots[place];
    slot->object = object, slot->kind = kind, slot->uses++;
    handle = (uintptr_t)slot->uses << (PLACE_BITS + KIND_BITS) | (uintptr_t)place << KIND_BITS |
             kind;
  }
  pthread_mutex_unlock(&lock);
  return (void *)handle;
}

static Slot *slot_of(Kind kind, uintptr_t handle) {
  uint32_t place = handle >> KIND_BITS & (MOST_SLOTS - 1);
  if ((handle & ((1 << KIND_BITS) - 1)) != kind || place >= slot_count) return NULL;
  Slot *slot = &slots[place];
  bool same = slot->uses == handle >> (PLACE_BITS + KIND_BITS);
  return same && slot->object && slot->kind == kind ? slot : NULL;
}

void *object_of(Kind kind, const void *handle) {
  pthread_mutex_lock(&lock);
  Slot *slot = slot_of(kind, (uintptr_t)handle);
  Object *object = slot ? slot->object : NULL;
  if (object) keep(object);
  pthread_mutex_unlock(&lock);
  return object;
}

void *close_handle(Kind kind, const void *handle) {
  pthread_mutex_lock(&lock);
  Slot *slot = slot_of(kind, (uintptr_t)handle);
  Object *object = slot ? slot->object : NULL;
  if (slot) {
    slot->object = NULL;
    slot->next_free = first_free;
    first_free = (uint32_t)(slot - slots);
  }
  pthread_mutex_unlock(&lock);
  return object;
}

gcuError stale(Kind kind, const void *handle) {
  static const char *const names[] = {
    [A_STREAM] = "stream", [AN_EVENT] = "event", [A_MODULE] = "module", [A_FUNCTION] = "function"};
  if (!handle) return fail(gcuErrorInvalidHandle, "NULL is no %s", names[kind]);
  return fail(gcuErrorInvalidHandle, "%p is no %s, or was one that is gone", handle, names[kind]);
}

void after_fork_handles(void) { pthread_mutex_init(&lock, NULL); }

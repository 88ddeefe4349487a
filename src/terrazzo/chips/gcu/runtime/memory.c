/* Memory of devices: each has a range of addresses of its own, of which only what is allocated can
   be touched. A table of live blocks tells what a pointer is worth. */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE ((size_t)4096)
#define HUGE_PAGE ((size_t)2 << 20)
#define SMALLEST_RANGE ((size_t)64 << 30)
/* A page that nobody owns lies behind each block, so that kernels that run over its end are found
   out. Each costs the system a mapping, of which a process has 65530: of many blocks the later ones
   lie side by side. */
#define MOST_GUARDED 12000

static size_t round_up(size_t size, size_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

/* ---------------------------------------------------------------- tables of blocks */

/* The first block that ends behind an address; `count` if there is none. */
static size_t block_after(const Block *blocks, size_t count, uintptr_t address) {
  size_t low = 0, high = count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (blocks[middle].start + blocks[middle].size > address) high = middle;
    else low = middle + 1;
  }
  return low;
}

static Block block_at(const Block *blocks, size_t count, uintptr_t address) {
  size_t place = block_after(blocks, count, address);
  if (place < count && blocks[place].start <= address) return blocks[place];
  return (Block){0, 0};
}

static bool reaches(Block block, uintptr_t address, size_t size) {
  return block.size && size <= block.size - (address - block.start);
}

static bool insert_block(Block **blocks, size_t *count, size_t *room, Block block) {
  if (*count == *room) {
    size_t larger = *room ? 2 * *room : 64;
    Block *moved = realloc(*blocks, larger * sizeof block);
    if (!moved) return false;
    *blocks = moved, *room = larger;
  }
  size_t place = block_after(*blocks, *count, block.start);
  memmove(*blocks + place + 1, *blocks + place, (*count - place) * sizeof block);
  (*blocks)[place] = block;
  ++*count;
  return true;
}

/* The block that begins at an address, taken out; size 0: none does. */
static Block remove_block(Block *blocks, size_t *count, uintptr_t start) {
  size_t place = block_after(blocks, *count, start);
  if (place == *count || blocks[place].start != start) return (Block){0, 0};
  Block block = blocks[place];
  --*count;
  memmove(blocks + place, blocks + place + 1, (*count - place) * sizeof block);
  return block;
}

/* ---------------------------------------------------------------- ranges and room in them */

static size_t pages_of(const Block *block) { return round_up(block->size, PAGE); }

static gcuError reserve(Memory *memory) {
  if (memory->start) return gcuSuccess;
  size_t least = round_up((size_t)chip.memory_bytes, HUGE_PAGE) + HUGE_PAGE;
  size_t range = 2 * least > SMALLEST_RANGE ? 2 * least : SMALLEST_RANGE;
  void *start = MAP_FAILED;
  /* Less room than wanted only means that freed addresses come back sooner. */
  for (;;) {
    start = mmap(NULL, range, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start != MAP_FAILED || range == least) break;
    range = range / 2 > least ? range / 2 : least;
  }
  if (start == MAP_FAILED)
    return fail(gcuErrorOutOfMemory, "the system has no %zu bytes of addresses for a device",
                least);
  memory->range = range;
  memory->next = (uintptr_t)start;
  atomic_store_explicit(&memory->start, (uintptr_t)start, memory_order_release);
  return gcuSuccess;
}

/* Where a block fits at or behind an address, before an end; 0: nowhere. */
static uintptr_t room_from(const Memory *memory, uintptr_t from, uintptr_t end, size_t size,
                           size_t gap, size_t alignment) {
  size_t place = block_after(memory->blocks, memory->count, from);
  uintptr_t start = round_up(from, alignment);
  for (; place < memory->count; place++) {
    const Block *block = &memory->blocks[place];
    if (block->start >= start && block->start - start >= size + gap) break;
    start = round_up(block->start + pages_of(block) + gap, alignment);
  }
  return start < end && end - start >= size + gap ? start : 0;
}

static uintptr_t find_room(Memory *memory, size_t size) {
  size_t pages = round_up(size, PAGE), gap = memory->count < MOST_GUARDED ? PAGE : 0;
  size_t alignment = size >= 2 * HUGE_PAGE ? HUGE_PAGE : PAGE;
  uintptr_t end = memory->start + memory->range;
  uintptr_t start = room_from(memory, memory->next, end, pages, gap, alignment);
  if (!start) start = room_from(memory, memory->start, end, pages, gap, alignment);
  if (!start) start = room_from(memory, memory->start, end, pages, 0, PAGE);
  if (start) memory->next = start + pages + gap;
  return start;
}

static bool commit(uintptr_t start, size_t size) {
  size_t pages = round_up(size, PAGE);
  if (mprotect((void *)start, pages, PROT_READ | PROT_WRITE)) return false;
  if (size >= 2 * HUGE_PAGE) madvise((void *)start, pages, MADV_HUGEPAGE);
  return true;
}

static void decommit(const Block *block) {
  /* Fresh pages over the old ones, which are gone for the system: whoever touches them faults. */
  mmap((void *)block->start, pages_of(block), PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

static gcuError allocate(Memory *memory, size_t size, void **pointer) {
  size_t taken = round_up(size, ALIGNMENT);
  int64_t left = chip.memory_bytes - memory->allocated;
  if (taken < size || taken > (size_t)left)
    return fail(gcuErrorOutOfMemory,
                "%zu bytes asked for, and %lld of %lld are left (%lld blocks)", size,
                (long long)left, (long long)chip.memory_bytes, (long long)memory->count);
  gcuError error = reserve(memory);
  if (error) return error;
  uintptr_t start = find_room(memory, size);
  if (!start)
    return fail(gcuErrorOutOfMemory, "no %zu bytes in one piece are left in %zu blocks", size,
                memory->count);
  if (!insert_block(&memory->blocks, &memory->count, &memory->room, (Block){start, size}))
    return out_of_host_memory(memory->room * sizeof(Block));
  if (!commit(start, size)) {
    remove_block(memory->blocks, &memory->count, start);
    return out_of_host_memory(size);
  }
  memory->allocated += (int64_t)taken, memory->allocations++;
  if (memory->allocated > memory->peak) memory->peak = memory->allocated;
  *pointer = (void *)start;
  return gcuSuccess;
}

gcuError gcuMalloc(void **pointer, size_t size) {
  gcuError error = claim();
  if (!error) error = known_device(current_device()->number);
  if (error) return error;
  if (!pointer) return fail(gcuErrorInvalidValue, "gcuMalloc of %zu bytes to NULL", size);
  *pointer = NULL;
  if (!size) return gcuSuccess;
  Memory *memory = &current_device()->memory;
  pthread_mutex_lock(&memory->lock);
  error = allocate(memory, size, pointer);
  pthread_mutex_unlock(&memory->lock);
  return error;
}

static int device_of(uintptr_t address) {
  for (int number = 0; number < device_count; number++) {
    Memory *memory = &devices[number].memory;
    uintptr_t start = atomic_load_explicit(&memory->start, memory_order_acquire);
    if (start && address >= start && address - start < memory->range) return number;
  }
  return HOST;
}

gcuError gcuFree(void *pointer) {
  gcuError error = claim();
  if (!error) error = may_wait("gcuFree");
  if (error || !pointer) return error;
  int number = device_of((uintptr_t)pointer);
  if (number == HOST)
    return fail(gcuErrorInvalidPointer, "gcuFree(%p): this is memory of the host", pointer);
  Memory *memory = &devices[number].memory;
  /* A kernel that runs may read it: what failed there is for others to report. */
  wait_for_device(&devices[number]);
  pthread_mutex_lock(&memory->lock);
  Block inside = block_at(memory->blocks, memory->count, (uintptr_t)pointer);
  Block block = remove_block(memory->blocks, &memory->count, (uintptr_t)pointer);
  if (block.size) {
    decommit(&block);
    memory->allocated -= (int64_t)round_up(block.size, ALIGNMENT);
  }
  pthread_mutex_unlock(&memory->lock);
  if (block.size) return gcuSuccess;
  if (inside.size)
    return fail(gcuErrorInvalidPointer, "gcuFree(%p): this is byte %zu of the %zu at %p", pointer,
                (size_t)((uintptr_t)pointer - inside.start), inside.size, (void *)inside.start);
  return fail(gcuErrorInvalidPointer,
              "gcuFree(%p): nothing is allocated there on device %d, or no more", pointer, number);
}

void free_all(Device *device) {
  Memory *memory = &device->memory;
  pthread_mutex_lock(&memory->lock);
  for (size_t place = 0; place < memory->count; place++) decommit(&memory->blocks[place]);
  memory->count = 0;
  memory->allocated = memory->peak = memory->allocations = 0;
  pthread_mutex_unlock(&memory->lock);
}

gcuError gcuMemGetInfo(gcuMemoryInfo *info, int device) {
  gcuError error = ready();
  if (!error) error = known_device(device);
  if (error) return error;
  if (!info) return fail(gcuErrorInvalidValue, "gcuMemGetInfo to NULL");
  Memory *memory = &devices[device].memory;
  pthread_mutex_lock(&memory->lock);
  *info = (gcuMemoryInfo){.allocated = memory->allocated, .peak = memory->peak,
                          .free = chip.memory_bytes - memory->allocated,
                          .total = chip.memory_bytes, .allocations = memory->allocations};
  pthread_mutex_unlock(&memory->lock);
  return gcuSuccess;
}

/* ---------------------------------------------------------------- blocks outside the devices */

typedef struct Table { pthread_mutex_t lock; Block *blocks; size_t count, room; } Table;

static Table pinned = {.lock = PTHREAD_MUTEX_INITIALIZER};     /* memory of the host */
static Table variables = {.lock = PTHREAD_MUTEX_INITIALIZER};  /* of modules */

static Block found_in(Table *table, uintptr_t address) {
  pthread_mutex_lock(&table->lock);
  Block block = block_at(table->blocks, table->count, address);
  pthread_mutex_unlock(&table->lock);
  return block;
}

static gcuError add_to(Table *table, Block block) {
  pthread_mutex_lock(&table->lock);
  bool done = insert_block(&table->blocks, &table->count, &table->room, block);
  pthread_mutex_unlock(&table->lock);
  return done ? gcuSuccess : out_of_host_memory(table->room * sizeof block);
}

static Block take_from(Table *table, uintptr_t start) {
  pthread_mutex_lock(&table->lock);
  Block block = remove_block(table->blocks, &table->count, start);
  pthread_mutex_unlock(&table->lock);
  return block;
}

gcuError add_variables(uintptr_t start, size_t size) {
  return size ? add_to(&variables, (Block){start, size}) : gcuSuccess;
}

void remove_variables(uintptr_t start) { take_from(&variables, start); }

void after_fork_memory(void) {
  pthread_mutex_init(&pinned.lock, NULL);
  pthread_mutex_init(&variables.lock, NULL);
}

gcuError gcuHostAlloc(void **pointer, size_t size) {
  gcuError error = claim();
  if (error) return error;
  if (!pointer) return fail(gcuErrorInvalidValue, "gcuHostAlloc of %zu bytes to NULL", size);
  *pointer = NULL;
  if (!size) return gcuSuccess;
  void *memory;
  if (size > PTRDIFF_MAX || posix_memalign(&memory, PAGE, size)) return out_of_host_memory(size);
  error = add_to(&pinned, (Block){(uintptr_t)memory, size});
  if (error) free(memory);
  else *pointer = memory;
  return error;
}

gcuError gcuHostFree(void *pointer) {
  gcuError error = ready();
  if (!error) error = may_wait("gcuHostFree");
  if (error || !pointer) return error;
  wait_for_all_devices(); /* copies may be under way */
  if (!take_from(&pinned, (uintptr_t)pointer).size)
    return fail(gcuErrorInvalidPointer, "gcuHostFree(%p): gcuHostAlloc did not give this, or it is "
                "free already", pointer);
  free(pointer);
  return gcuSuccess;
}

bool is_pinned(const void *pointer, size_t size) {
  return reaches(found_in(&pinned, (uintptr_t)pointer), (uintptr_t)pointer, size);
}

gcuError gcuHostIsPinned(int *answer, const void *pointer) {
  gcuError error = ready();
  if (error) return error;
  if (!answer) return fail(gcuErrorInvalidValue, "gcuHostIsPinned to NULL");
  *answer = is_pinned(pointer, 1);
  return gcuSuccess;
}

/* ---------------------------------------------------------------- what a pointer is worth */

Place place_of(const void *pointer, size_t size) {
  uintptr_t address = (uintptr_t)pointer;
  Place place = {.device = device_of(address)};
  if (place.device == HOST) {
    place.block = found_in(&variables, address);
    if (place.block.size) place.device = MODULE;
  } else {
    Memory *memory = &devices[place.device].memory;
    pthread_mutex_lock(&memory->lock);
    place.block = block_at(memory->blocks, memory->count, address);
    pthread_mutex_unlock(&memory->lock);
  }
  place.live = reaches(place.block, address, size);
  return place;
}

gcuError live_on(int device, const void *pointer, size_t size, const char *what) {
  Place place = place_of(pointer, size);
  if (place.device == HOST)
    return fail(gcuErrorInvalidPointer, "%s %p is memory of the host, not of device %d", what,
                pointer, device);
  if (place.device != device && place.device != MODULE)
    return fail(gcuErrorInvalidPointer, "%s %p is memory of device %d, not of device %d", what,
                pointer, place.device, device);
  if (place.live) return gcuSuccess;
  if (!place.block.size)
    return fail(gcuErrorInvalidPointer,
                "%s %p: nothing is allocated there on device %d, or no more", what, pointer,
                device);
  return fail(gcuErrorInvalidPointer,
              "%s %p: %zu bytes from byte %zu on run over the end of the %zu allocated at %p", what,
              pointer, size, (size_t)((uintptr_t)pointer - place.block.start), place.block.size,
              (void *)place.block.start);
}

gcuError check_addresses(Device *device, const char *kinds, const int64_t *arguments, int count) {
  Memory *memory = &device->memory;
  int bad = -1;
  pthread_mutex_lock(&memory->lock);
  for (int place = 0; place < count && bad < 0; place++) {
    uintptr_t address = (uintptr_t)arguments[place];
    if (kinds[place] != 'p' || !address) continue;
    if (!block_at(memory->blocks, memory->count, address).size) bad = place;
  }
  pthread_mutex_unlock(&memory->lock);
  if (bad < 0) return gcuSuccess;
  /* The slow way says what is wrong with the first bad one, if it is no variable of a module. */
  for (int place = bad; place < count; place++) {
    if (kinds[place] != 'p' || !arguments[place]) continue;
    char what[32];
    snprintf(what, sizeof what, "argument %d,", place);
    gcuError error = live_on(device->number, (const void *)(uintptr_t)arguments[place], 1, what);
    if (error) return error;
  }
  return gcuSuccess;
}

gcuError gcuPointerGetDevice(int *device, const void *pointer) {
  gcuError error = ready();
  if (error) return error;
  if (!device) return fail(gcuErrorInvalidValue, "gcuPointerGetDevice to NULL");
  Place place = place_of(pointer, 1);
  if (place.device >= 0 && !place.live)
    return fail(gcuErrorInvalidPointer, "%p: nothing is allocated there on device %d, or no more",
                pointer, place.device);
  *device = place.device == MODULE ? current_device()->number : place.device;
  return gcuSuccess;
}

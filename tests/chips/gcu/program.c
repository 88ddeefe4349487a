/* A program that knows nothing but the header and the library: runs `mark` of an image on every
   device, and what goes wrong on purpose. Exits with 0 when all of it is as it should be. */
#include "gcu_runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WANT(code, call)                                                                         \
  do {                                                                                           \
    gcuError got = (call);                                                                       \
    if (got != (code)) {                                                                         \
      fprintf(stderr, "%d: %s gave %s: %s\n", __LINE__, #call, gcuGetErrorName(got),             \
              gcuGetLastErrorMessage());                                                         \
      exit(1);                                                                                   \
    }                                                                                            \
  } while (0)

static unsigned char *read_file(const char *path, size_t *size) {
  FILE *file = fopen(path, "rb");
  if (!file) exit(2);
  fseek(file, 0, SEEK_END);
  *size = (size_t)ftell(file);
  rewind(file);
  unsigned char *bytes = malloc(*size);
  if (!bytes || fread(bytes, 1, *size, file) != *size) exit(2);
  fclose(file);
  return bytes;
}

static void run_on(int device, gcuFunction_t mark) {
  enum { PROGRAMS = 96 };
  int64_t numbers[PROGRAMS];
  void *memory;
  gcuStream_t stream;
  WANT(gcuSuccess, gcuSetDevice(device));
  WANT(gcuSuccess, gcuMalloc(&memory, sizeof numbers));
  WANT(gcuSuccess, gcuStreamCreate(&stream));
  WANT(gcuSuccess, gcuMemsetAsync(memory, 0, sizeof numbers, stream));
  int64_t argument = (int64_t)(intptr_t)memory;
  WANT(gcuErrorInvalidGrid, gcuLaunchKernel(mark, 57, 1, 1, &argument, 1, stream));
  if (strcmp(gcuGetLastErrorMessage(), "Invalid grid size 57 (must be <= 48 or multiple of 48)"))
    exit(3);
  WANT(gcuSuccess, gcuLaunchKernel(mark, PROGRAMS, 1, 1, &argument, 1, stream));
  WANT(gcuSuccess, gcuLaunchFolded(mark, 57, 1, 1, &argument, 1, stream));
  WANT(gcuSuccess, gcuMemcpyAsync(numbers, memory, sizeof numbers, gcuMemcpyDeviceToHost, stream));
  WANT(gcuSuccess, gcuStreamSynchronize(stream));
  for (int n = 0; n < PROGRAMS; n++)
    if (numbers[n] != (n < 57 ? 2 : 1)) exit(4);
  WANT(gcuErrorInvalidDirection, gcuMemcpy(memory, numbers, 8, gcuMemcpyDeviceToHost));
  WANT(gcuSuccess, gcuStreamDestroy(stream));
  WANT(gcuErrorInvalidHandle, gcuStreamSynchronize(stream));
  WANT(gcuSuccess, gcuFree(memory));
  WANT(gcuErrorInvalidPointer, gcuFree(memory));
}

int main(int count, char **arguments) {
  size_t size;
  if (count != 3) return 2;
  gcuDescription chip = {.size = sizeof chip, .name = "gcu", .devices = 3, .units = 48, .warps = 1,
                         .free_grid = 48, .grid_multiple = 48, .clock_khz = 1000000,
                         .memory_bytes = 1 << 30, .scratchpad_bytes = 1 << 20,
                         .launch_cycles = 1000};
  memcpy(chip.fingerprint, arguments[2], sizeof chip.fingerprint);
  int devices;
  WANT(gcuErrorInitialization, gcuGetDeviceCount(&devices));
  WANT(gcuSuccess, gcuConfigure(&chip));
  WANT(gcuSuccess, gcuGetDeviceCount(&devices));
  unsigned char *image = read_file(arguments[1], &size);
  gcuModule_t module;
  gcuFunction_t mark;
  WANT(gcuSuccess, gcuModuleLoadData(&module, image, size));
  WANT(gcuSuccess, gcuModuleGetFunction(&mark, module, "mark"));
  for (int device = 0; device < devices; device++) run_on(device, mark);
  WANT(gcuSuccess, gcuModuleUnload(module));
  image[size / 2] ^= 1;
  WANT(gcuErrorInvalidImage, gcuModuleLoadData(&module, image, size));
  free(image);
  printf("%d devices\n", devices);
  return 0;
}

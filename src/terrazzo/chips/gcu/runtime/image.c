/* Images: object code with a table of its functions, every length of which is checked. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

static const char magic[8] = "GCUIMAGE";
enum { VERSION = 1, HEADER = 64, FINGERPRINT = 32 };

typedef struct Reader { const unsigned char *bytes; size_t at, size; bool ended; } Reader;

uint64_t gcuImageChecksum(const void *bytes, size_t size) {
  uint64_t sum = 0xcbf29ce484222325u;
  for (size_t at = 0; at < size; at++)
    sum = (sum ^ ((const unsigned char *)bytes)[at]) * 0x100000001b3u;
  return sum;
}

static const unsigned char *take(Reader *reader, size_t size) {
  if (reader->ended || size > reader->size - reader->at) {
    reader->ended = true;
    return NULL;
  }
  reader->at += size;
  return reader->bytes + reader->at - size;
}

static uint64_t take_number(Reader *reader, int bytes) {
  const unsigned char *at = take(reader, (size_t)bytes);
  uint64_t number = 0;
  for (int place = bytes - 1; at && place >= 0; place--) number = number << 8 | at[place];
  return number;
}

/* A length and so many bytes, as text; NULL: the image ends, it holds a zero, or no memory. */
static char *take_text(Reader *reader) {
  size_t size = take_number(reader, 4);
  const unsigned char *bytes = take(reader, size);
  if (!bytes || memchr(bytes, 0, size)) return NULL;
  char *text = malloc(size + 1);
  if (!text) return NULL;
  memcpy(text, bytes, size);
  text[size] = 0;
  return text;
}

static void destroy_function(Object *object) {
  Function *function = (Function *)object;
  for (int call = 0; function->calls && call < function->call_count; call++)
    free(function->calls[call]);
  free(function->calls);
  free(function->name);
  free(function->symbol);
  free(function->kinds);
  if (function->code) let_go(function->code);
  free(function);
}

static bool take_calls(Reader *reader, Function *function) {
  size_t count = take_number(reader, 4);
  if (reader->ended || count > (reader->size - reader->at) / 4) return false;
  function->calls = calloc(count + 1, sizeof *function->calls);
  if (!function->calls) return false;
  function->call_count = (int)count;
  for (size_t call = 0; call < count; call++)
    if (!(function->calls[call] = take_text(reader))) return false;
  return true;
}

static Function *take_function(Reader *reader) {
  Function *function = calloc(1, sizeof *function);
  if (!function) return NULL;
  function->object.references = 1;
  function->object.destroy = destroy_function;
  function->name = take_text(reader);
  function->symbol = take_text(reader);
  uint64_t kind = take_number(reader, 4);
  uint64_t scratchpad = take_number(reader, 8);
  function->kinds = take_text(reader);
  bool sound = function->name && function->symbol && function->kinds && kind <= 1 &&
               scratchpad <= INT64_MAX && take_calls(reader, function) &&
               (kind == 1 || function->call_count == 1) &&
               strspn(function->kinds, kind ? "phifc" : "phif") == strlen(function->kinds);
  if (!sound) {
    destroy_function(&function->object);
    return NULL;
  }
  function->is_plan = kind == 1;
  function->scratchpad = (int64_t)scratchpad;
  function->argument_count = (int)strlen(function->kinds);
  return function;
}

void drop_functions(Image *image) {
  for (size_t place = 0; place < image->count; place++) let_go(image->functions[place]);
  free(image->functions);
  image->functions = NULL, image->count = 0;
}

static gcuError damaged(const char *how, size_t size) {
  return fail(gcuErrorInvalidImage, "an image of %zu bytes is damaged: %s", size, how);
}

static gcuError read_header(Reader *reader, uint64_t *functions) {
  const unsigned char *start = take(reader, sizeof magic);
  if (!start || memcmp(start, magic, sizeof magic))
    return fail(gcuErrorInvalidImage, "%zu bytes that do not begin as an image does", reader->size);
  uint64_t version = take_number(reader, 4);
  *functions = take_number(reader, 4);
  uint64_t size = take_number(reader, 8), sum = take_number(reader, 8);
  const unsigned char *fingerprint = take(reader, FINGERPRINT);
  if (!fingerprint) return damaged("it ends within its header", reader->size);
  if (version != VERSION)
    return fail(gcuErrorInvalidImage, "an image of version %llu, where this library reads %d",
                (unsigned long long)version, VERSION);
  if (size != reader->size) return damaged("it says that it has another size", reader->size);
  if (memcmp(fingerprint, chip.fingerprint, FINGERPRINT))
    return fail(gcuErrorInvalidImage, "an image for another chip than this %s", chip.name);
  if (sum != gcuImageChecksum(reader->bytes + HEADER, reader->size - HEADER))
    return damaged("its checksum is wrong", reader->size);
  return gcuSuccess;
}

gcuError read_image(const void *bytes, size_t size, Image *image) {
  Reader reader = {.bytes = bytes, .size = size};
  uint64_t count = 0;
  gcuError error = read_header(&reader, &count);
  if (error) return error;
  /* The shortest function has 28 bytes, so that a wrong count asks for no absurd table. */
  if (count > size / 28) return damaged("it is too short for its functions", size);
  *image = (Image){.functions = calloc(count + 1, sizeof(Function *))};
  if (!image->functions) return out_of_host_memory(count * sizeof(Function *));
  while (image->count < count) {
    Function *function = take_function(&reader);
    if (!function) {
      drop_functions(image);
      return damaged("the table of its functions is wrong", size);
    }
    image->functions[image->count++] = function;
  }
  image->object_size = take_number(&reader, 8);
  image->object = take(&reader, image->object_size);
  if (image->object && reader.at == size) return gcuSuccess;
  drop_functions(image);
  return damaged("its object code does not end where it does", size);
}

/* Modules: images in memory, and the functions in them. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

typedef struct Module {
  Object object;
  Code *code;
  Image image;                        /* of which only the functions are left */
} Module;

static void destroy_module(Object *object) {
  Module *module = (Module *)object;
  drop_functions(&module->image);
  if (module->code) let_go(module->code);
  free(module);
}

static void close_functions(Module *module) {
  for (size_t place = 0; place < module->image.count; place++) {
    Function *function = close_handle(A_FUNCTION, module->image.functions[place]->handle);
    if (function) let_go(function);
  }
}

/* Finds the entries of functions, and gives each function a handle. */
static gcuError open_functions(Module *module) {
  for (size_t place = 0; place < module->image.count; place++) {
    Function *function = module->image.functions[place];
    function->entry = symbol_address(module->code, function->symbol);
    if (function->entry < (uintptr_t)module->code->start ||
        function->entry >= module->code->constants)
      return fail(gcuErrorInvalidImage, "the object code of an image defines no function %.100s",
                  function->symbol);
    function->code = module->code;
    keep(module->code);
    keep(function); /* the handle's */
    function->handle = open_handle(A_FUNCTION, &function->object);
    if (function->handle) continue;
    let_go(function);
    return fail(gcuErrorOutOfMemory, "there is no room for another function");
  }
  return gcuSuccess;
}

gcuError gcuModuleLoadData(gcuModule_t *handle, const void *bytes, size_t size) {
  gcuError error = claim();
  if (error) return error;
  if (!handle || !bytes)
    return fail(gcuErrorInvalidValue, "gcuModuleLoadData of %p to %p", bytes, (void *)handle);
  Module *module = calloc(1, sizeof *module);
  if (!module) return out_of_host_memory(sizeof *module);
  module->object.references = 1;
  module->object.destroy = destroy_module;
  error = read_image(bytes, size, &module->image);
  if (!error) error = load_object(module->image.object, module->image.object_size, &module->code);
  if (!error) error = open_functions(module);
  module->image.object = NULL;
  void *opened = error ? NULL : open_handle(A_MODULE, &module->object);
  if (opened) {
    *handle = opened;
    return gcuSuccess;
  }
  close_functions(module);
  let_go(module);
  return error ? error : fail(gcuErrorOutOfMemory, "there is no room for another module");
}

gcuError gcuModuleUnload(gcuModule_t handle) {
  gcuError error = ready();
  if (error) return error;
  Module *module = close_handle(A_MODULE, handle);
  if (!module) return stale(A_MODULE, handle);
  close_functions(module);
  let_go(module);
  return gcuSuccess;
}

static gcuError find_module(gcuModule_t handle, const void *target, const char *name,
                            Module **module) {
  gcuError error = ready();
  if (error) return error;
  if (!target || !name)
    return fail(gcuErrorInvalidValue, "a lookup of %p to %p", (const void *)name, target);
  *module = object_of(A_MODULE, handle);
  return *module ? gcuSuccess : stale(A_MODULE, handle);
}

gcuError gcuModuleGetFunction(gcuFunction_t *handle, gcuModule_t module_handle, const char *name) {
  Module *module;
  gcuError error = find_module(module_handle, handle, name, &module);
  if (error) return error;
  size_t place = 0, count = module->image.count;
  while (place < count && strcmp(module->image.functions[place]->name, name)) place++;
  if (place < count) *handle = module->image.functions[place]->handle;
  else error = fail(gcuErrorNotFound, "the module has no function %.200s", name);
  let_go(module);
  return error;
}

gcuError gcuModuleGetGlobal(void **address, gcuModule_t module_handle, const char *name) {
  Module *module;
  gcuError error = find_module(module_handle, address, name, &module);
  if (error) return error;
  uintptr_t found = symbol_address(module->code, name);
  bool is_variable = found - module->code->variables < module->code->variables_size;
  if (is_variable) *address = (void *)found;
  else error = fail(gcuErrorNotFound, "the module has no variable %.200s", name);
  let_go(module);
  return error;
}

gcuError gcuFunctionGetInfo(gcuFunctionInfo *info, gcuFunction_t handle) {
  gcuError error = ready();
  if (error) return error;
  if (!info) return fail(gcuErrorInvalidValue, "gcuFunctionGetInfo to NULL");
  Function *function = object_of(A_FUNCTION, handle);
  if (!function) return stale(A_FUNCTION, handle);
  *info = (gcuFunctionInfo){.arguments = function->argument_count, .is_plan = function->is_plan,
                            .calls = function->call_count,
                            .scratchpad_bytes = function->scratchpad};
  let_go(function);
  return gcuSuccess;
}

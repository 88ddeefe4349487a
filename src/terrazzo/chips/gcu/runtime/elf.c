/* A loader of relocatable ELF objects, as LLVM writes them for x86-64: code, constants and
   variables that call each other and functions of the process. Everything goes into one mapping,
   which is written and then protected: code can be executed but not written, constants only read.
   Functions elsewhere may be further away than a 32-bit displacement reaches, so each has a slot
   that holds its address, and a stub that jumps through it. (The loader of chips/cpu, in C.) */
#include "internal.h"

#include <dlfcn.h>
#include <elf.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE ((size_t)4096)
#define MOST_BYTES ((size_t)1 << 30)  /* displacements must fit into 32 bits with their sign */
#define NOWHERE SIZE_MAX
enum { SLOT = 8, STUB = 8, JUMP_BYTES = 6 };

typedef struct File {
  const unsigned char *bytes;
  size_t size;
  Elf64_Shdr *sections;
  size_t section_count;
  size_t *places;                     /* of sections in the mapping, or NOWHERE */
  Elf64_Sym *symbols;
  size_t symbol_count;
  const char *names;
  size_t names_size;
  size_t *slots, *stubs;              /* of symbols, or NOWHERE */
  uintptr_t *outside;                 /* addresses of those that are defined elsewhere */
} File;

static gcuError unsound(const char *how) {
  return fail(gcuErrorInvalidImage, "the object code of an image cannot be loaded: %s", how);
}

static void close_file(File *file) {
  free(file->sections), free(file->places), free(file->symbols);
  free(file->slots), free(file->stubs), free(file->outside);
}

/* ---------------------------------------------------------------- reading */

static bool within(const File *file, uint64_t offset, uint64_t size) {
  return offset <= file->size && size <= file->size - offset;
}

/* A copy, since nothing in an image is aligned. One more element keeps sizes from being zero. */
static void *copied(const File *file, uint64_t offset, size_t count, size_t each) {
  void *copy = calloc(count + 1, each);
  if (copy) memcpy(copy, file->bytes + offset, count * each);
  return copy;
}

static bool is_loaded(const Elf64_Shdr *section) {
  return section->sh_flags & SHF_ALLOC && section->sh_type != SHT_NOTE &&
         section->sh_type != SHT_X86_64_UNWIND;
}

static gcuError check_section(const File *file, const Elf64_Shdr *section) {
  if (!is_loaded(section)) return gcuSuccess;
  uint64_t both = SHF_WRITE | SHF_EXECINSTR, alignment = section->sh_addralign;
  if (section->sh_type != SHT_PROGBITS && section->sh_type != SHT_NOBITS)
    return unsound("it has a section of an unknown kind");
  if (section->sh_flags & SHF_TLS) return unsound("it has variables of threads");
  if ((section->sh_flags & both) == both) return unsound("it has code that can be written");
  if (alignment & (alignment - 1) || alignment > PAGE) return unsound("a section is badly aligned");
  if (section->sh_size > MOST_BYTES) return unsound("a section is too large");
  if (section->sh_type == SHT_PROGBITS && !within(file, section->sh_offset, section->sh_size))
    return unsound("a section lies outside it");
  return gcuSuccess;
}

static gcuError check_symbol(const File *file, const Elf64_Sym *symbol) {
  if (symbol->st_name >= file->names_size ||
      !memchr(file->names + symbol->st_name, 0, file->names_size - symbol->st_name))
    return unsound("the name of a symbol lies outside it");
  if (symbol->st_shndx >= SHN_LORESERVE)
    return symbol->st_shndx == SHN_ABS ? gcuSuccess : unsound("it has common symbols");
  if (symbol->st_shndx >= file->section_count) return unsound("a symbol lies in no section");
  if (ELF64_ST_TYPE(symbol->st_info) > STT_SECTION) return unsound("it has a symbol of a thread");
  return gcuSuccess;
}

static gcuError read_symbols(File *file) {
  const Elf64_Shdr *table = NULL;
  for (size_t number = 0; number < file->section_count; number++) {
    if (file->sections[number].sh_type != SHT_SYMTAB) continue;
    if (table) return unsound("it has several tables of symbols");
    table = &file->sections[number];
  }
  if (!table) return unsound("it has no symbols");
  if (table->sh_link >= file->section_count) return unsound("its symbols have no names");
  const Elf64_Shdr *names = &file->sections[table->sh_link];
  if (names->sh_type != SHT_STRTAB || !within(file, names->sh_offset, names->sh_size) ||
      !within(file, table->sh_offset, table->sh_size) || table->sh_size % sizeof(Elf64_Sym))
    return unsound("its table of symbols is wrong");
  file->names = (const char *)file->bytes + names->sh_offset;
  file->names_size = names->sh_size;
  file->symbol_count = table->sh_size / sizeof(Elf64_Sym);
  file->symbols = copied(file, table->sh_offset, file->symbol_count, sizeof(Elf64_Sym));
  if (!file->symbols) return out_of_host_memory(table->sh_size);
  for (size_t number = 0; number < file->symbol_count; number++) {
    gcuError error = check_symbol(file, &file->symbols[number]);
    if (error) return error;
  }
  return gcuSuccess;
}

static gcuError read_file(File *file) {
  Elf64_Ehdr header;
  if (file->size < sizeof header) return unsound("it ends within its header");
  memcpy(&header, file->bytes, sizeof header);
  if (memcmp(header.e_ident, ELFMAG, SELFMAG) || header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_ident[EI_DATA] != ELFDATA2LSB || header.e_type != ET_REL)
    return unsound("it is no 64-bit object");
#ifdef __x86_64__
  if (header.e_machine != EM_X86_64) return unsound("it is for another processor");
#else
  return unsound("objects are loaded on x86-64 alone");
#endif
  file->section_count = header.e_shnum;
  if (header.e_shentsize != sizeof(Elf64_Shdr) || !header.e_shnum ||
      !within(file, header.e_shoff, header.e_shnum * sizeof(Elf64_Shdr)))
    return unsound("its table of sections is wrong");
  file->sections = copied(file, header.e_shoff, header.e_shnum, sizeof(Elf64_Shdr));
  if (!file->sections) return out_of_host_memory(header.e_shnum * sizeof(Elf64_Shdr));
  for (size_t number = 0; number < file->section_count; number++) {
    gcuError error = check_section(file, &file->sections[number]);
    if (error) return error;
  }
  return read_symbols(file);
}

/* ---------------------------------------------------------------- relocations */

/* What one names: an address, one within the object, a function, or the slot of an address. */
typedef enum Target { ANYWHERE, NEAR, BY_STUB, BY_SLOT } Target;
typedef struct Rule { Target target; int bytes; bool relative; } Rule;

static bool rule_of(uint32_t kind, Rule *rule) {
  switch (kind) {
    case R_X86_64_64: *rule = (Rule){ANYWHERE, 8, false}; return true;
    case R_X86_64_PC32: *rule = (Rule){NEAR, 4, true}; return true;
    case R_X86_64_PLT32: *rule = (Rule){BY_STUB, 4, true}; return true;
    case R_X86_64_GOTPCREL:
    case R_X86_64_GOTPCRELX:
    case R_X86_64_REX_GOTPCRELX: *rule = (Rule){BY_SLOT, 4, true}; return true;
    case R_X86_64_PC64: *rule = (Rule){ANYWHERE, 8, true}; return true;
    default: return false;
  }
}

typedef gcuError Visit(File *file, Code *code, size_t section, const Elf64_Rela *one, Rule rule);

/* Calls a function for every relocation of what is loaded. */
static gcuError each_relocation(File *file, Code *code, Visit *visit) {
  for (size_t number = 0; number < file->section_count; number++) {
    const Elf64_Shdr *table = &file->sections[number];
    if (table->sh_type != SHT_RELA) continue;
    if (table->sh_info >= file->section_count) return unsound("relocations of no section");
    const Elf64_Shdr *target = &file->sections[table->sh_info];
    if (!is_loaded(target)) continue;
    if (!within(file, table->sh_offset, table->sh_size) || table->sh_size % sizeof(Elf64_Rela) ||
        table->sh_link >= file->section_count ||
        file->sections[table->sh_link].sh_type != SHT_SYMTAB || target->sh_type == SHT_NOBITS)
      return unsound("a table of relocations is wrong");
    for (uint64_t at = 0; at < table->sh_size; at += sizeof(Elf64_Rela)) {
      Elf64_Rela one;
      Rule rule;
      memcpy(&one, file->bytes + table->sh_offset + at, sizeof one);
      if (!rule_of(ELF64_R_TYPE(one.r_info), &rule))
        return unsound("a relocation is of no known kind");
      if (one.r_offset > target->sh_size || target->sh_size - one.r_offset < (size_t)rule.bytes)
        return unsound("a relocation lies outside its section");
      size_t symbol = ELF64_R_SYM(one.r_info);
      if (!symbol || symbol >= file->symbol_count) return unsound("a relocation names no symbol");
      gcuError error = visit(file, code, table->sh_info, &one, rule);
      if (error) return error;
    }
  }
  return gcuSuccess;
}

static uintptr_t in_process(const char *name) {
  if (!strcmp(name, "tz_parallel_for")) return (uintptr_t)tz_parallel_for;
  void *found = dlsym(RTLD_DEFAULT, name);
  if (!found) {
    /* A program that is not linked with it has no functions of mathematics. */
    void *mathematics = dlopen("libm.so.6", RTLD_LAZY | RTLD_LOCAL);
    if (mathematics) found = dlsym(mathematics, name);
  }
  return (uintptr_t)found;
}

/* Marks which symbols need a slot or a stub, and finds those that are defined elsewhere. */
static gcuError note(File *file, Code *code, size_t section, const Elf64_Rela *one, Rule rule) {
  size_t number = ELF64_R_SYM(one->r_info);
  const Elf64_Sym *symbol = &file->symbols[number];
  const char *name = file->names + symbol->st_name;
  (void)code, (void)section;
  bool elsewhere = symbol->st_shndx == SHN_UNDEF;
  if (elsewhere && rule.target == NEAR)
    return fail(gcuErrorInvalidImage, "the object code of an image expects %.100s to be near",
                name);
  if (elsewhere && !file->outside[number] && !(file->outside[number] = in_process(name)))
    return fail(gcuErrorInvalidImage, "the object code of an image needs %.100s, which nobody has",
                name);
  if (elsewhere) file->stubs[number] = 0;
  if (elsewhere || rule.target == BY_SLOT) file->slots[number] = 0;
  return gcuSuccess;
}

/* ---------------------------------------------------------------- placing */

static size_t round_up(size_t size, size_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

static size_t place_sections(File *file, size_t end, uint64_t kind) {
  for (size_t number = 0; number < file->section_count; number++) {
    const Elf64_Shdr *section = &file->sections[number];
    if (!is_loaded(section) || (section->sh_flags & (SHF_WRITE | SHF_EXECINSTR)) != kind) continue;
    end = round_up(end, section->sh_addralign ? section->sh_addralign : 1);
    file->places[number] = end;
    end += section->sh_size;
    if (end > MOST_BYTES) return end; /* is found out before it can overflow */
  }
  return end;
}

static size_t place_marked(size_t *places, size_t count, size_t end, size_t each) {
  for (size_t number = 0; number < count; number++)
    if (places[number] != NOWHERE) {
      places[number] = round_up(end, each);
      end = places[number] + each;
    }
  return end;
}

typedef struct Layout { size_t constants, variables, size; } Layout;

static gcuError place(File *file, Layout *layout) {
  size_t end = place_sections(file, 0, SHF_EXECINSTR);
  end = place_marked(file->stubs, file->symbol_count, end, STUB);
  layout->constants = end = round_up(end, PAGE);
  if (end <= MOST_BYTES) end = place_sections(file, end, 0);
  end = place_marked(file->slots, file->symbol_count, end, SLOT);
  layout->variables = end = round_up(end, PAGE);
  if (end <= MOST_BYTES) end = place_sections(file, end, SHF_WRITE);
  layout->size = round_up(end, PAGE);
  if (!layout->size) layout->size = PAGE;
  return layout->size > MOST_BYTES ? unsound("it is too large") : gcuSuccess;
}

static gcuError address_of(const File *file, const Code *code, size_t number, uintptr_t *address) {
  const Elf64_Sym *symbol = &file->symbols[number];
  *address = file->outside[number];
  if (symbol->st_shndx == SHN_UNDEF) return gcuSuccess;
  *address = symbol->st_value;
  if (symbol->st_shndx == SHN_ABS) return gcuSuccess;
  if (file->places[symbol->st_shndx] == NOWHERE ||
      symbol->st_value > file->sections[symbol->st_shndx].sh_size)
    return unsound("a symbol lies outside what is loaded");
  *address = (uintptr_t)code->start + file->places[symbol->st_shndx] + symbol->st_value;
  return gcuSuccess;
}

/* ---------------------------------------------------------------- writing */

static gcuError relocate(File *file, Code *code, size_t section, const Elf64_Rela *one, Rule rule) {
  size_t number = ELF64_R_SYM(one->r_info);
  char *at = code->start + file->places[section] + one->r_offset;
  uintptr_t target;
  gcuError error = address_of(file, code, number, &target);
  if (error) return error;
  if (rule.target == BY_SLOT) target = (uintptr_t)code->start + file->slots[number];
  else if (rule.target == BY_STUB && file->stubs[number] != NOWHERE)
    target = (uintptr_t)code->start + file->stubs[number];
  uint64_t value = target + (uint64_t)one->r_addend - (rule.relative ? (uintptr_t)at : 0);
  if (rule.bytes == 4 && (int64_t)value != (int32_t)value)
    return unsound("a relocation reaches too far");
  memcpy(at, &value, (size_t)rule.bytes);
  return gcuSuccess;
}

static gcuError write_code(File *file, Code *code) {
  for (size_t number = 0; number < file->section_count; number++)
    if (file->places[number] != NOWHERE && file->sections[number].sh_type == SHT_PROGBITS)
      memcpy(code->start + file->places[number], file->bytes + file->sections[number].sh_offset,
             file->sections[number].sh_size);
  for (size_t number = 0; number < file->symbol_count; number++) {
    if (file->slots[number] == NOWHERE) continue;
    uintptr_t address;
    gcuError error = address_of(file, code, number, &address);
    if (error) return error;
    memcpy(code->start + file->slots[number], &address, sizeof address);
    if (file->stubs[number] == NOWHERE) continue;
    /* jmp *displacement(%rip) */
    int32_t displacement = (int32_t)(file->slots[number] - file->stubs[number] - JUMP_BYTES);
    memcpy(code->start + file->stubs[number], "\xff\x25", 2);
    memcpy(code->start + file->stubs[number] + 2, &displacement, sizeof displacement);
  }
  return each_relocation(file, code, relocate);
}

static gcuError protect(const Code *code, const Layout *layout) {
  size_t constants = layout->variables - layout->constants;
  if ((layout->constants && mprotect(code->start, layout->constants, PROT_READ | PROT_EXEC)) ||
      (constants && mprotect(code->start + layout->constants, constants, PROT_READ)))
    return unsound("this system does not let code be made executable");
  return gcuSuccess;
}

static bool is_export(const Elf64_Sym *symbol) {
  return symbol->st_shndx != SHN_UNDEF && ELF64_ST_BIND(symbol->st_info) != STB_LOCAL;
}

static gcuError list_symbols(const File *file, Code *code) {
  code->symbols = calloc(file->symbol_count + 1, sizeof *code->symbols);
  if (!code->symbols) return out_of_host_memory(file->symbol_count * sizeof *code->symbols);
  for (size_t number = 0; number < file->symbol_count; number++) {
    if (!is_export(&file->symbols[number])) continue;
    Symbol symbol = {.name = strdup(file->names + file->symbols[number].st_name)};
    if (!symbol.name) return out_of_host_memory(file->names_size);
    code->symbols[code->symbol_count++] = symbol;
    gcuError error = address_of(file, code, number, &code->symbols[code->symbol_count - 1].address);
    if (error) return error;
  }
  return gcuSuccess;
}

uintptr_t symbol_address(const Code *code, const char *name) {
  for (size_t number = 0; number < code->symbol_count; number++)
    if (!strcmp(code->symbols[number].name, name)) return code->symbols[number].address;
  return 0;
}

static void destroy_code(Object *object) {
  Code *code = (Code *)object;
  if (code->start && code->variables_size) remove_variables(code->variables);
  if (code->start) munmap(code->start, code->size);
  for (size_t number = 0; number < code->symbol_count; number++) free(code->symbols[number].name);
  free(code->symbols);
  free(code);
}

static size_t *nowhere(size_t count) {
  size_t *places = malloc((count + 1) * sizeof *places);
  for (size_t number = 0; places && number < count; number++) places[number] = NOWHERE;
  return places;
}

static gcuError link_file(File *file, Code *code) {
  file->places = nowhere(file->section_count);
  file->slots = nowhere(file->symbol_count);
  file->stubs = nowhere(file->symbol_count);
  file->outside = calloc(file->symbol_count + 1, sizeof *file->outside);
  if (!file->places || !file->slots || !file->stubs || !file->outside)
    return out_of_host_memory(file->symbol_count * sizeof(uintptr_t));
  Layout layout;
  gcuError error = each_relocation(file, NULL, note);
  if (!error) error = place(file, &layout);
  if (error) return error;
  void *start = mmap(NULL, layout.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return out_of_host_memory(layout.size);
  code->start = start, code->size = layout.size;
  code->constants = (uintptr_t)start + layout.constants;
  error = write_code(file, code);
  if (!error) error = protect(code, &layout);
  if (!error) error = list_symbols(file, code);
  if (error) return error;
  code->variables = (uintptr_t)start + layout.variables;
  error = add_variables(code->variables, layout.size - layout.variables);
  if (!error) code->variables_size = layout.size - layout.variables;
  return error;
}

gcuError load_object(const unsigned char *object, size_t size, Code **code) {
  File file = {.bytes = object, .size = size};
  *code = calloc(1, sizeof **code);
  if (!*code) return out_of_host_memory(sizeof **code);
  (*code)->object.references = 1;
  (*code)->object.destroy = destroy_code;
  gcuError error = read_file(&file);
  if (!error) error = link_file(&file, *code);
  close_file(&file);
  if (error) {
    let_go(*code);
    *code = NULL;
  }
  return error;
}

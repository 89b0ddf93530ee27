// What the module's own file tells: its static shared arrays, which are its thread-local symbols, and source lines of reports.
#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "runtime.h"

namespace simt {
namespace {

thread_local volatile char thread_local_anchor;
uintptr_t anchor_offset = 0;
constexpr const char* kSuffix = "_simt";  // of SIMT_SHARED's variables

std::vector<std::string> reports;
size_t left_out = 0;
constexpr std::ptrdiff_t kMostOfAKind = 2;

int find_segments(dl_phdr_info* info, size_t, void* result) {
  auto& found = *static_cast<Image*>(result);
  const auto here = reinterpret_cast<uintptr_t>(&find_segments);
  uintptr_t low = ~uintptr_t(0), high = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD) continue;
    low = std::min(low, uintptr_t(info->dlpi_addr + segment.p_vaddr));
    high = std::max(high, uintptr_t(info->dlpi_addr + segment.p_vaddr + segment.p_memsz));
  }
  if (here < low || here >= high) return 0;
  found.path = info->dlpi_name;
  found.base = info->dlpi_addr;
  found.low = low;
  found.high = high;
  return 1;
}

std::string demangled(const char* symbol) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(symbol, nullptr, nullptr, &status), &std::free);
  return name ? name.get() : symbol;
}

void read_symbols(Image& found) {
  const int file = open(found.path.c_str(), O_RDONLY);
  struct stat status{};
  if (file < 0 || fstat(file, &status)) throw std::runtime_error("cannot read " + found.path);
  auto* bytes = static_cast<const char*>(mmap(nullptr, size_t(status.st_size), PROT_READ, MAP_PRIVATE, file, 0));
  close(file);
  const auto& header = *reinterpret_cast<const ElfW(Ehdr)*>(bytes);
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(bytes + header.e_shoff);
  bool anchored = false;
  for (int i = 0; i < header.e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(bytes + sections[i].sh_offset);
    const char* const names = bytes + sections[sections[i].sh_link].sh_offset;
    for (size_t k = 0; k < sections[i].sh_size / sizeof *symbols; ++k) {
      if ((symbols[k].st_info & 15) != STT_TLS || symbols[k].st_shndx == SHN_UNDEF) continue;
      std::string name = demangled(names + symbols[k].st_name);
      if (name.find("thread_local_anchor") != std::string::npos) {
        anchor_offset = symbols[k].st_value;
        anchored = true;
      }
      if (name.size() < 5 || name.compare(name.size() - 5, 5, kSuffix) != 0) continue;
      name.resize(name.size() - 5);
      const size_t scope = name.rfind("::");
      if (scope != std::string::npos) name.erase(0, scope + 2);
      found.arrays.push_back({"__shared__ " + name, uintptr_t(symbols[k].st_value), size_t(symbols[k].st_size) - kRedZone});
    }
  }
  munmap(const_cast<char*>(bytes), size_t(status.st_size));
  if (!anchored) throw std::runtime_error(found.path + " has no symbol table");
}

// The kernel's source lines of a code address, innermost first; the emulator's own frames are left out.
std::string source_lines(const std::string& pc) {
  const unsigned long address = std::strtoul(pc.c_str(), nullptr, 16) - 1;  // of the call, not of where it returns to
  char command[4352];
  std::snprintf(command, sizeof command, "addr2line -i -e '%s' 0x%lx 2>/dev/null", image().path.c_str(), address);
  const std::unique_ptr<FILE, decltype(&pclose)> pipe(popen(command, "r"), &pclose);
  std::string lines;
  char line[4096];
  int shown = 0;
  while (pipe && std::fgets(line, sizeof line, pipe.get())) {
    std::string text = line;
    text.resize(text.find_last_not_of("\n") + 1);
    text.resize(std::min(text.size(), text.find(" (discriminator")));
    if (text.empty() || text[0] == '?' || text.find("/simt/runtime/") != std::string::npos || shown == 4) continue;
    lines += (shown++ ? ", from " : "") + text;
  }
  return shown ? "at " + lines : "at +0x" + pc;
}

}  // namespace

const Image& image() {
  static const Image found = [] {
    Image image;
    dl_iterate_phdr(find_segments, &image);
    read_symbols(image);
    return image;
  }();
  return found;
}

char* thread_local_storage() {
  image();
  return const_cast<char*>(&thread_local_anchor) - anchor_offset;
}

std::string block_name() {
  char text[64];
  std::snprintf(text, sizeof text, "block (%u,%u,%u)", block.index.x, block.index.y, block.index.z);
  return text;
}

std::string where() {
  if (!self) return "the host";
  char text[64];
  std::snprintf(text, sizeof text, " thread (%u,%u,%u)", self->index.x, self->index.y, self->index.z);
  return block_name() + text;
}

void report(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  const std::string kind(text, std::strcspn(text, "]"));
  const auto same = [&](const std::string& other) { return other.compare(0, kind.size(), kind) == 0; };
  if (std::count_if(reports.begin(), reports.end(), same) < kMostOfAKind)
    reports.emplace_back(text);
  else
    ++left_out;
}

bool reported() { return !reports.empty(); }

void shuffle_from_inactive(int lane, int source, Site site) {
  report("[divergence] %s: lane %d shuffles from lane %d, which takes no part, at %s:%d", block_name().c_str(), lane, source,
         site.file, site.line);
}

std::string take_reports() {
  std::string all;
  for (std::string& text : reports) {
    for (size_t at; (at = text.find("pc=+0x")) != std::string::npos;) {
      const size_t end = text.find_first_not_of("0123456789abcdef", at + 6);
      const std::string pc = text.substr(at + 6, end == std::string::npos ? end : end - at - 6);
      text.replace(at, 6 + pc.size(), source_lines(pc));
    }
    all += (all.empty() ? "" : "\n") + text;
  }
  if (left_out) all += "\n... and " + std::to_string(left_out) + " more";
  left_out = 0;
  reports.clear();
  return all;
}

}  // namespace simt

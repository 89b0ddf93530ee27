# The CUDA kernels, by nvcc alone: neither a GPU nor a CUDA build of torch is needed, nor CMake's CUDA language, whose checks
# some layouts of the toolkit fail (that of the PyPI packages). Sets CUDA_OBJECTS, CUDA_LIBRARIES and CUDA_DEFINITIONS.
#
# PYCKPT_CUDA: auto (where an nvcc is found), on, off.
# PYCKPT_CUDA_ARCHS: architectures to compile for, such as "80;90;100+PTX" (or 8.0 9.0 10.0+PTX). +PTX adds code that newer GPUs
# compile for themselves. If empty TORCH_CUDA_ARCH_LIST, as torch's extensions take it; then the default.
set(DEFAULT_ARCHS "80;90;100+PTX")
set(OLDEST_ARCH 80)  # bfloat16 in hardware, cp.async

set(CUDA_OBJECTS)
set(CUDA_LIBRARIES)

# Sets `sass` and `ptx` from a list in either notation.
function(parse_archs variable list)
  # Names, as torch.utils.cpp_extension knows them
  set(NAMED_Ampere "8.0;8.6+PTX")
  set(NAMED_Ada "8.9+PTX")
  set(NAMED_Hopper "9.0+PTX")
  set(NAMED_Blackwell "10.0;10.3;12.0;12.1+PTX")
  set(sass)
  set(ptx)
  string(REGEX REPLACE "[ ,;]+" ";" items "${list}")
  set(expanded)
  foreach(item IN LISTS items)
    if(DEFINED NAMED_${item})
      list(APPEND expanded ${NAMED_${item}})
    else()
      list(APPEND expanded ${item})
    endif()
  endforeach()
  foreach(item IN LISTS expanded)
    if(NOT item MATCHES "^([0-9]+)\\.?([0-9])([af]?)(\\+PTX)?$")
      message(FATAL_ERROR "pyckpt: ${variable}: '${item}' is not an architecture; expected for example \"${DEFAULT_ARCHS}\"")
    endif()
    set(arch "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    set(name "${arch}${CMAKE_MATCH_3}")
    set(with_ptx "${CMAKE_MATCH_4}")
    if(arch LESS OLDEST_ARCH)
      set(problem "pyckpt: ${variable}: the kernels need compute capability 8.0 or newer, not '${item}'")
      if(variable STREQUAL "PYCKPT_CUDA_ARCHS")
        message(FATAL_ERROR "${problem}")
      endif()
      message(WARNING "${problem}: left out")  # the list is not for us alone
      continue()
    endif()
    list(APPEND sass ${name})
    if(with_ptx)
      list(APPEND ptx ${name})
    endif()
  endforeach()
  if(NOT sass)
    message(FATAL_ERROR "pyckpt: ${variable} names no architecture that the kernels can be compiled for: '${list}'")
  endif()
  list(REMOVE_DUPLICATES sass)
  list(REMOVE_DUPLICATES ptx)
  set(sass ${sass} PARENT_SCOPE)
  set(ptx ${ptx} PARENT_SCOPE)
endfunction()

# Sets `nvcc` to the compiler, or `looked_in` to where there is none.
function(find_nvcc)
  set(looked_in)
  set(candidates)
  if(DEFINED ENV{CUDACXX} AND NOT "$ENV{CUDACXX}" STREQUAL "")
    list(APPEND candidates "$ENV{CUDACXX}")
  endif()
  foreach(variable CUDA_HOME CUDA_PATH)
    if(DEFINED ENV{${variable}} AND NOT "$ENV{${variable}}" STREQUAL "")
      list(APPEND candidates "$ENV{${variable}}/bin/nvcc")
    endif()
  endforeach()
  find_program(on_path nvcc NO_CACHE NO_CMAKE_PATH NO_CMAKE_ENVIRONMENT_PATH NO_CMAKE_SYSTEM_PATH)
  if(on_path)
    list(APPEND candidates "${on_path}")
  endif()
  list(APPEND candidates "${PYCKPT_CUDA_TOOLKIT}/bin/nvcc")
  # nvidia-cuda-nvcc & co. of this environment; an isolated build sees only the environment's own folder.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import sysconfig; print(sysconfig.get_path('purelib'))"
    OUTPUT_VARIABLE site OUTPUT_STRIP_TRAILING_WHITESPACE)
  file(GLOB packages "${site}/nvidia/*/bin/nvcc")
  list(APPEND candidates ${packages})
  foreach(candidate IN LISTS candidates)
    if(EXISTS "${candidate}")
      set(nvcc "${candidate}" PARENT_SCOPE)
      return()
    endif()
    list(APPEND looked_in "${candidate}")
  endforeach()
  list(JOIN looked_in ", " looked_in)
  set(looked_in "PATH, ${looked_in}, ${site}/nvidia" PARENT_SCOPE)
endfunction()

function(compile_cuda_kernels)
  # A wrapper may stand on PATH: nvcc itself tells where it lies. Its messages are shown if it cannot.
  execute_process(COMMAND "${nvcc}" --dryrun x.cu OUTPUT_VARIABLE told ERROR_VARIABLE told RESULT_VARIABLE failed)
  if(failed OR NOT told MATCHES "TOP=([^\n]*)")
    message(FATAL_ERROR "pyckpt: ${nvcc} does not work (PYCKPT_CUDA=off builds without CUDA):\n${told}")
  endif()
  get_filename_component(toolkit "${CMAKE_MATCH_1}" REALPATH)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE version)
  if(NOT version MATCHES "V([0-9.]+)")
    message(FATAL_ERROR "pyckpt: ${nvcc} --version says\n${version}")
  endif()
  set(version "${CMAKE_MATCH_1}")

  set(flags -std=c++17 -O3 --fmad=false -ccbin "${CMAKE_CXX_COMPILER}" -Xcompiler -fPIC,-fvisibility=hidden
            -I "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/cuda")
  if(version VERSION_GREATER_EQUAL 12.8)
    list(APPEND flags --compress-mode=size)  # a quarter of the bytes
  endif()
  list(LENGTH sass count)
  cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
  set(threads 1)  # Ninja runs a compiler for each file already
  if(cores GREATER 4)
    set(threads ${count})
  endif()
  foreach(arch IN LISTS sass)
    list(APPEND flags "-gencode=arch=compute_${arch},code=sm_${arch}")
  endforeach()
  foreach(arch IN LISTS ptx)
    list(APPEND flags "-gencode=arch=compute_${arch},code=compute_${arch}")
  endforeach()

  # Whatever is wrong with this compiler, these architectures or the host's compiler shows in a small file, in its own words.
  set(probe "${CMAKE_CURRENT_BINARY_DIR}/probe.cu")
  file(WRITE "${probe}" "#include <cuda_bf16.h>\n__global__ void probe(__nv_bfloat16* x) { x[0] = __float2bfloat16(1.0f); }\n")
  execute_process(COMMAND "${nvcc}" ${flags} -c "${probe}" -o "${probe}.o" OUTPUT_VARIABLE said ERROR_VARIABLE said
                  RESULT_VARIABLE failed)
  if(failed)
    list(JOIN sass ", " wanted)
    message(
      FATAL_ERROR
        "pyckpt: nvcc ${version} (${nvcc}) cannot compile for ${wanted}:\n${said}\nPYCKPT_CUDA_ARCHS chooses other "
        "architectures, CUDA_HOME another toolkit, CXX another host compiler; PYCKPT_CUDA=off builds without CUDA.")
  endif()
  find_file(CUDART libcudart_static.a PATHS "${toolkit}" NO_DEFAULT_PATH
            PATH_SUFFIXES lib64 lib "targets/${CMAKE_HOST_SYSTEM_PROCESSOR}-linux/lib" targets/sbsa-linux/lib)
  if(NOT CUDART)
    message(FATAL_ERROR "pyckpt: no libcudart_static.a in ${toolkit}; install the toolkit's, or nvidia-cuda-runtime")
  endif()

  file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/cuda/*.cu")
  set(objects)
  foreach(source IN LISTS sources)
    get_filename_component(name "${source}" NAME_WE)
    set(object "${CMAKE_CURRENT_BINARY_DIR}/${name}.cu.o")
    add_custom_command(
      OUTPUT "${object}"
      COMMAND "${nvcc}" ${flags} --threads ${threads} -MD -MF "${object}.d" -c "${source}" -o "${object}"
      DEPENDS "${source}" "${nvcc}"
      DEPFILE "${object}.d"
      COMMENT "Compiling ${name}.cu for ${count} architectures"
      VERBATIM)
    list(APPEND objects "${object}")
  endforeach()

  message(STATUS "CUDA kernels: nvcc ${version} (${nvcc}), sm_${sass}, PTX of compute_${ptx}")
  set(CUDA_OBJECTS "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/cuda/bindings.cpp" ${objects} PARENT_SCOPE)
  set(CUDA_LIBRARIES "${CUDART}" pthread dl rt PARENT_SCOPE)
  list(JOIN sass "," sass)
  list(JOIN ptx "," ptx)
  set(CUDA_DEFINITIONS PYCKPT_CUDA="${version}" PYCKPT_CUDA_SASS="${sass}" PYCKPT_CUDA_PTX="${ptx}" PARENT_SCOPE)
endfunction()

string(TOLOWER "${PYCKPT_CUDA}" PYCKPT_CUDA)
if(PYCKPT_CUDA STREQUAL "off")
  set(CUDA_DEFINITIONS PYCKPT_NO_CUDA="PYCKPT_CUDA=off")
elseif(PYCKPT_CUDA STREQUAL "auto" OR PYCKPT_CUDA STREQUAL "on")
  find_nvcc()
  if(nvcc)
    if(PYCKPT_CUDA_ARCHS)
      parse_archs(PYCKPT_CUDA_ARCHS "${PYCKPT_CUDA_ARCHS}")
    elseif(NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
      parse_archs(TORCH_CUDA_ARCH_LIST "$ENV{TORCH_CUDA_ARCH_LIST}")
    else()
      parse_archs(DEFAULT_ARCHS "${DEFAULT_ARCHS}")
    endif()
    compile_cuda_kernels()
  elseif(PYCKPT_CUDA STREQUAL "on")
    message(FATAL_ERROR "pyckpt: PYCKPT_CUDA=on, but there is no nvcc (looked in ${looked_in}). Set CUDA_HOME, or "
                        "pip install nvidia-cuda-nvcc nvidia-cuda-cccl into this environment.")
  else()
    message(STATUS "No CUDA kernels: no nvcc was found (looked in ${looked_in})")
    set(CUDA_DEFINITIONS PYCKPT_NO_CUDA="no nvcc was found")
  endif()
else()
  message(FATAL_ERROR "pyckpt: PYCKPT_CUDA is auto, on or off, not '${PYCKPT_CUDA}'")
endif()

# Installs the library, builds both examples against it from fresh folders, runs them and compares
# their numbers: C and C++ must agree to the digit.

function(must)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result OUTPUT_VARIABLE output
                  ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "${command}\nended with ${result}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

set(compilers -G Ninja -D CMAKE_CXX_COMPILER=${CXX} -D CMAKE_C_COMPILER=${CC}
              -D CMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER} -D CMAKE_C_COMPILER_LAUNCHER=${LAUNCHER})
if(SANITIZE)
  # A library with sanitizers needs their runtime in the program.
  list(APPEND compilers -D CMAKE_C_FLAGS=-fsanitize=${SANITIZE}
                        -D CMAKE_CXX_FLAGS=-fsanitize=${SANITIZE})
endif()

file(REMOVE_RECURSE ${WORK}/prefix ${WORK}/cpp_minimal ${WORK}/c_minimal)
if(KIND STREQUAL "other_kind")
  if(SHARED)
    set(other OFF)
  else()
    set(other ON)
  endif()
  must(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build ${compilers} -D BUILD_SHARED_LIBS=${other}
       -D CMAKE_BUILD_TYPE=Debug -D KDA_CUDA=OFF -D KDA_TOOLS=OFF -D KDA_TESTS=OFF -D KDA_BENCH=OFF
       -D KDA_SANITIZE=${SANITIZE})
  must(${CMAKE_COMMAND} --build ${WORK}/build)
  set(BUILD ${WORK}/build)
  set(CONFIG Debug)
endif()
must(${CMAKE_COMMAND} --install ${BUILD} --config ${CONFIG} --prefix ${WORK}/prefix)

# Moved, so that nothing may know where it was installed.
file(REMOVE_RECURSE ${WORK}/moved)
file(RENAME ${WORK}/prefix ${WORK}/moved)
foreach(example cpp_minimal c_minimal)
  must(${CMAKE_COMMAND} -S ${SOURCE}/examples/${example} -B ${WORK}/${example} ${compilers}
       -D CMAKE_PREFIX_PATH=${WORK}/moved)
  must(${CMAKE_COMMAND} --build ${WORK}/${example})
  must(${WORK}/${example}/${example})
  message(STATUS "${example}\n${output}")
  if(NOT output MATCHES "^o: -?[0-9.]+ -?[0-9.]+ ... -?[0-9.]+\ndq: .*\ndv: .*\n$" OR
     output MATCHES "nan|inf|o: -?0.000000 -?0.000000")
    message(FATAL_ERROR "${example} printed\n${output}")
  endif()
  set(${example}_output "${output}")
endforeach()
if(NOT cpp_minimal_output STREQUAL c_minimal_output)
  message(FATAL_ERROR "the two examples differ:\n${cpp_minimal_output}\n${c_minimal_output}")
endif()

# Before 1.0 programs ask for the minor version that they were linked with.
file(GLOB shared ${WORK}/moved/*/libkda.so ${WORK}/moved/*/*/libkda.so)
if(shared AND NOT EXISTS ${shared}.0.1)
  message(FATAL_ERROR "${shared}.0.1 is missing")
endif()

# pkg-config follows the files too.
find_program(pkg_config pkg-config)
if(pkg_config)
  file(GLOB_RECURSE pc ${WORK}/moved/*/kda.pc)
  cmake_path(GET pc PARENT_PATH folder)
  must(${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${folder} ${pkg_config} --variable=includedir kda)
  string(STRIP "${output}" includes)
  file(REAL_PATH "${includes}" includes)
  file(REAL_PATH ${WORK}/moved/include expected)
  if(NOT includes STREQUAL expected)
    message(FATAL_ERROR "kda.pc says ${includes}, expected ${expected}")
  endif()
endif()

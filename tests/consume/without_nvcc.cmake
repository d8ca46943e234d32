# Configures where there is no CUDA compiler: by default without the backend, and with KDA_CUDA=ON an
# error that says what to do.
set(environment ${CMAKE_COMMAND} -E env --unset=CUDACXX --unset=CUDA_HOME --unset=CUDA_PATH
    "PATH=/usr/bin:/bin")
find_program(nvcc nvcc PATHS /usr/bin /bin NO_DEFAULT_PATH)
if(nvcc)
  message(STATUS "skipped: ${nvcc} cannot be hidden")
  return()
endif()
foreach(wanted AUTO ON)
  file(REMOVE_RECURSE ${WORK})
  execute_process(
    COMMAND ${environment} ${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK} -G Ninja
            -D CMAKE_MAKE_PROGRAM=${NINJA} -D CMAKE_CXX_COMPILER=${CXX} -D CMAKE_C_COMPILER=${CC}
            -D KDA_CUDA=${wanted} -D KDA_TOOLS=OFF -D KDA_TESTS=OFF -D KDA_BENCH=OFF
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " text "${output}")
  if(wanted STREQUAL "AUTO" AND NOT (result EQUAL 0 AND text MATCHES "CUDA backend: OFF"))
    message(FATAL_ERROR "KDA_CUDA=AUTO ended with ${result}\n${output}")
  elseif(wanted STREQUAL "ON" AND (result EQUAL 0 OR NOT text MATCHES "put nvcc on PATH"))
    message(FATAL_ERROR "KDA_CUDA=ON ended with ${result}\n${output}")
  endif()
endforeach()

# Warnings and sanitizers, for our own targets only.

add_library(kda_compile INTERFACE)
target_compile_options(kda_compile INTERFACE
  $<$<COMPILE_LANGUAGE:CXX,C>:-Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion>
  $<$<AND:$<COMPILE_LANGUAGE:CXX,C>,$<BOOL:${KDA_WERROR}>>:-Werror>)
if(KDA_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX,C>:-fsanitize=${KDA_SANITIZE}>
                      $<$<COMPILE_LANGUAGE:CXX,C>:-fno-omit-frame-pointer>
                      $<$<COMPILE_LANGUAGE:CXX,C>:-fno-sanitize-recover=all>)
  add_link_options(-fsanitize=${KDA_SANITIZE})
endif()
if(KDA_FUZZ)
  # Coverage of the library too, or libFuzzer is blind in it.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX,C>:-fsanitize=fuzzer-no-link>)
endif()

# TransformerEngine's bindings to torch, from their source package, unoptimised: on the null device their speed is nothing.
# One precompiled header carries torch's and TransformerEngine's own, which are nearly all that the compiler would read.
# make -f transformer_engine.mk SOURCE=... PYTHON=... HEADERS=... OUT=...

SITE := $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
SUFFIX := $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
CXX := g++
INCLUDE := $(SOURCE)/common_headers $(SOURCE)/common_headers/common $(SOURCE)/common_headers/common/include \
	$(SOURCE)/csrc $(SITE)/torch/include $(SITE)/torch/include/torch/csrc/api/include \
	$(HEADERS)/include $(HEADERS)/include/cccl $(SITE)/nvidia/cu13/include $(SITE)/nvidia/cudnn/include \
	$(SITE)/nvidia/nccl/include $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')
FLAGS := -O0 -g0 -w -std=c++20 -fPIC -fvisibility=hidden -DTORCH_EXTENSION_NAME=transformer_engine_torch \
	-DTORCH_API_INCLUDE_EXTENSION_H $(addprefix -I,$(INCLUDE))
SOURCES := $(shell find $(SOURCE)/csrc -name '*.cpp')
OBJECTS := $(patsubst $(SOURCE)/csrc/%.cpp,$(SOURCE)/objects/%.o,$(SOURCES))
MODULE := $(OUT)/transformer_engine_torch$(SUFFIX)

$(MODULE): $(OBJECTS)
	$(CXX) -shared -o $@ $^ -L$(SITE)/torch/lib -ltorch -ltorch_cpu -ltorch_cuda -ltorch_python -lc10 -lc10_cuda \
		-Wl,-rpath,$(SITE)/torch/lib

$(SOURCE)/objects/all.h.gch: $(SOURCE)/csrc/extensions.h
	mkdir -p $(@D)
	printf '#include "extensions.h"\n#include "pybind.h"\n' >$(@D)/all.h
	$(CXX) $(FLAGS) -x c++-header $(@D)/all.h -o $@

$(SOURCE)/objects/%.o: $(SOURCE)/csrc/%.cpp $(SOURCE)/objects/all.h.gch
	mkdir -p $(@D)
	$(CXX) $(FLAGS) -include $(SOURCE)/objects/all.h -c $< -o $@

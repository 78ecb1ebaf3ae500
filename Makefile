# For Debian 12 and later and Ubuntu 22.04 and later. `make help` lists what there is.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The system's own, whatever comes first on PATH: only it has bcc.
PYTHON := /usr/bin/python3
# Tools of the tests only.
VENV := .venv
TOOLS := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
C_FILES = $(shell find lockd tests bench -name build -prune -o '(' -name '*.[ch]' -o -name '*.cpp' ')' -print)

# What lockd and its unit need; /bin/kill, which the unit runs, is of procps. `a|b`: whichever the release has.
RUN_PACKAGES := python3 python3-bcrypt python3-bpfcc python3-numpy python3-prometheus-client \
	python3-rich python3-seccomp python3-systemd python3-tornado python3-yaml 'libbpf1|libbpf0' \
	'libdw1|libdw1t64' binutils procps

# What builds tests/programs, and the servers among them. None of these starts a service.
PROGRAM_PACKAGES := g++ musl-tools rustc cargo librust-parking-lot-dev golang-go \
	'openjdk-17-jdk-headless|default-jdk-headless' \
	'mariadb-server-core|mariadb-server-core-10.6' mariadb-client redis-tools sysbench

# What lockd's tests need besides.
TEST_PACKAGES := gcc libc6-dev make python3-venv ca-certificates openssl systemd zstd \
	'bpftool|linux-tools-common' bpftrace bpfcc-tools e2fsprogs mmdebstrap qemu-system-x86 'chromium|chromium-browser' \
	python3-matplotlib $(PROGRAM_PACKAGES)

# Others' benchmarks and tools, for `make bench`.
BENCH_PACKAGES := 'linux-perf|linux-tools-common' stress-ng bpftrace bpfcc-tools

# Servers for the tests, `make services` and `make alerts` that would start when they are installed: they are unpacked instead, and
# again with each new version of the release.
UNPACKED_PACKAGES := memcached nginx postgresql prometheus prometheus-alertmanager
UNPACKED := $(or $(LOCKD_CACHE),/var/cache/lockd-tests)/servers

# Where `make install` puts things; DESTDIR is the root directory of another system, if it is for one.
PREFIX := /usr
SYSCONFDIR := /etc
DESTDIR :=
LIB := $(PREFIX)/lib/lockd
# systemd searches no other prefix.
OF_SYSTEMD := $(if $(filter /usr /usr/local,$(PREFIX)),$(PREFIX)/lib,$(SYSCONFDIR))
UNIT := $(OF_SYSTEMD)/systemd/system/lockd.service
USERS := $(OF_SYSTEMD)/sysusers.d/lockd.conf
SYSUSERS := systemd-sysusers
# What starts leave there: programs as they were compiled.
CACHE := /var/cache/lockd

# Recipes give these to programs without quotes: with a blank inside or at an end, `rm -rf` would remove another directory.
no_blanks = $(foreach name,PREFIX SYSCONFDIR DESTDIR,$(if $(filter 1,$(words x$($(name))x)),,\
	$(error $(name): "$($(name))" has a blank; rule: a path without blanks)))

as_root = [ "$$(id -u)" = 0 ] || { echo "make $(MAKECMDGOALS): needs root, to $(1): sudo make $(MAKECMDGOALS)" >&2; exit 1; }

.PHONY: help run test test-all ready kernels bench services alerts fleet faults fuzz unit lint format dashboards packages workloads \
	install uninstall

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

# With a terminal the daemon gets it for itself (set -m), so that Ctrl-C ends the daemon and not make. The
# `exit` keeps bash: it would run a last command in its own place.
run: ## install what lockd needs and run it on this host until Ctrl-C (ARGS='more flags')
	@$(call as_root,install packages and load BPF programs)
	@deploy/apt-need $(RUN_PACKAGES)
	@if [ -t 0 ]; then set -m; fi; $(PYTHON) -m lockd run --config.file=config/lockd.yaml $(ARGS); exit

test: ready ## install what the tests need and run all that a change must pass, in 15 to 30 minutes (ARGS='what to give pytest': only that)
	@$(MAKE) --no-print-directory lint
	@$(TOOLS) $(VENV)/bin/$(if $(ARGS),pytest $(ARGS),python -m tests.run)

test-all: ready ## run every test, on every kernel, and `make run` and `make test` in a bare root
	@$(MAKE) --no-print-directory lint
	@$(TOOLS) $(VENV)/bin/python -m tests.run --all
	@tests/bare/run

kernels: ready ## run the tests of the programs on all other kernels, in emulated machines
	@$(TOOLS) $(VENV)/bin/pytest tests/vm $(ARGS)

ready: ## install what the tests need, build their programs, and make .venv with the tools
	@$(call as_root,install packages and trace the kernel)
	@deploy/apt-need $(RUN_PACKAGES) $(TEST_PACKAGES)
	@tests/unpack $(UNPACKED) $(UNPACKED_PACKAGES)
	@$(MAKE) --no-print-directory $(VENV)/made workloads

bench: ## measure what lockd costs, beside what users would run instead (ARGS='--quick'); 25 minutes
	@$(call as_root,install packages and trace the kernel)
	@deploy/apt-need $(RUN_PACKAGES) $(TEST_PACKAGES) $(BENCH_PACKAGES)
	@$(MAKE) --no-print-directory $(VENV)/made workloads
	@$(TOOLS) $(VENV)/bin/python -m bench.all $(ARGS)

services: ready ## run lockd beside many real services, watched by Prometheus (ARGS='--minutes 120'); 35 minutes
	@$(TOOLS) $(VENV)/bin/python -m bench.services $(ARGS)

fleet: ready ## measure what 1,000 hosts cost one Prometheus, and how long dashboards take (ARGS='--quick'); 50 minutes
	@$(TOOLS) $(VENV)/bin/python -m bench.fleet $(ARGS)

alerts: ready ## stage what each alert is about, with Prometheus and Alertmanager (ARGS='--faults deadlock'); 10 minutes
	@$(TOOLS) $(VENV)/bin/python -m bench.alerts $(ARGS)

faults: ready ## run lockd under churn, with a fault every minute (ARGS='--minutes 120'); 35 minutes
	@$(TOOLS) $(VENV)/bin/python -m bench.faults $(ARGS)

# A Python that atheris has no build for is told so by tests.fuzz, in words.
fuzz: $(VENV)/made ## have lockd read made-up inputs, by libFuzzer (ARGS='elf --runs 1000000'; tests/fuzz/README.md)
	@$(VENV)/bin/python -c 'import atheris' 2>/dev/null || $(VENV)/bin/python -m pip install --quiet \
		--disable-pip-version-check --only-binary :all: -r tests/fuzz/requirements.txt || true
	@$(VENV)/bin/python -m tests.fuzz $(ARGS)

unit: $(VENV)/made ## run the tests that need neither root nor BPF
	@$(TOOLS) $(VENV)/bin/pytest tests/unit $(ARGS)

lint: $(VENV)/made ## check the style of all code, and the types of the package
	$(VENV)/bin/ruff check --quiet
	$(VENV)/bin/ruff format --check --quiet
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror --ferror-limit=1 $(C_FILES)

format: $(VENV)/made ## put all code into that style
	$(VENV)/bin/ruff check --fix-only --quiet
	$(VENV)/bin/ruff format
	$(VENV)/bin/clang-format -i $(C_FILES)

dashboards: $(VENV)/made ## write grafana/*.json anew from the code beside it
	@$(VENV)/bin/python -m grafana

packages:
	@echo $(RUN_PACKAGES)

workloads:
	@$(MAKE) --no-print-directory -s -C tests/workloads
	@$(MAKE) --no-print-directory -s -C tests/programs

$(VENV)/made: tests/requirements.txt
	$(PYTHON) -m venv --clear --system-site-packages $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	command -v promtool >/dev/null || { tests/unpack $(VENV)/unpacked prometheus && \
		mv $(VENV)/unpacked/usr/bin/promtool $(VENV)/bin && rm -r $(VENV)/unpacked; }
	touch $@

# If DESTDIR has no /etc/passwd, it is the root of a package: the host that installs the package creates the users.
make_users = if [ ! -e $(DESTDIR)/etc/passwd ]; then :; \
	elif command -v $(SYSUSERS) >/dev/null; then $(SYSUSERS) --root=$(DESTDIR)/ - <deploy/sysusers.d/lockd.conf; \
	else echo "no $(SYSUSERS) here: until there are users lockd and lockd-namer, lockd's processes share the user" \
		"nobody with others'; make them with: useradd --system --no-create-home --shell /usr/sbin/nologin USER"; fi

# The new version is complete before it takes the place of the old one, from which a running service starts processes.
install: ## install lockd, its systemd unit and its users (PREFIX, SYSCONFDIR, DESTDIR)
	@$(no_blanks)
	@$(if $(DESTDIR),,$(call as_root,install files); deploy/apt-need $(RUN_PACKAGES))
	install -d $(addprefix $(DESTDIR),$(LIB) $(PREFIX)/bin $(SYSCONFDIR)/lockd $(dir $(UNIT) $(USERS)))
	rm -rf $(DESTDIR)$(LIB)/{new,old}
	install -d $(DESTDIR)$(LIB)/new
	tar -c --exclude=__pycache__ --owner=0 --group=0 --mode=u=rwX,go=rX lockd | tar -x -C $(DESTDIR)$(LIB)/new
	$(PYTHON) -m compileall -q -s "$(DESTDIR)$(LIB)/new" -p $(LIB) $(DESTDIR)$(LIB)/new
	cd $(DESTDIR)$(LIB) && { [ ! -e lockd ] || mv lockd old; } && mv new/lockd .
	rm -rf $(DESTDIR)$(LIB)/{new,old}
	sed 's|@LIB@|$(LIB)|' deploy/lockd.sh >$(DESTDIR)$(PREFIX)/bin/lockd
	chmod 755 $(DESTDIR)$(PREFIX)/bin/lockd
	[ -e $(DESTDIR)$(SYSCONFDIR)/lockd/lockd.yaml ] || \
		install -m 644 config/lockd.yaml $(DESTDIR)$(SYSCONFDIR)/lockd/
	sed 's|/usr/bin/lockd|$(PREFIX)/bin/lockd|; s|/etc/lockd/|$(SYSCONFDIR)/lockd/|' \
		deploy/systemd/lockd.service >$(DESTDIR)$(UNIT)
	install -m 644 deploy/sysusers.d/lockd.conf $(DESTDIR)$(USERS)
	@$(make_users)
	@if [ -z "$(DESTDIR)" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
	@if [ -z "$(DESTDIR)" ] && systemctl is-active --quiet lockd 2>/dev/null; then \
		echo "installed; restart it at once, because the old version now starts processes of the new one: systemctl restart lockd"; \
	else echo "installed; start it with: systemctl enable --now lockd"; fi

# Its users stay, as distributions have it: files may still be theirs, and must not be the next user's.
uninstall: ## stop lockd and remove its files, except its configuration and its users
	@$(no_blanks)
	@$(if $(DESTDIR),,$(call as_root,remove files))
	@if [ -z "$(DESTDIR)" ] && [ -d /run/systemd/system ] && [ -e $(UNIT) ]; then systemctl disable --now lockd; fi
	rm -rf $(DESTDIR)$(LIB) $(DESTDIR)$(PREFIX)/bin/lockd $(DESTDIR)$(UNIT) $(DESTDIR)$(USERS) $(DESTDIR)$(CACHE)
	@if [ -z "$(DESTDIR)" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
	@echo "uninstalled; $(SYSCONFDIR)/lockd and the users lockd and lockd-namer stay"

#!/bin/sh
# Installs Chromium, in which one test opens the report, if it is missing and can be installed.
# `chromium.sh required` prints 1 where that test must run (Chromium is installed, or this is CI), else 0.
find_chromium() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
if [ "${1:-}" = required ]; then
    if [ -n "${CI:-}" ] || find_chromium >/dev/null; then echo 1; else echo 0; fi
    exit
fi
if ! find_chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing chromium"
    (apt-get update && apt-get install -y --no-install-recommends chromium) >/dev/null 2>&1 ||
        echo "chromium could not be installed: the test that opens the report in it is skipped"
fi

#!/bin/sh
# headers.sh PYTHON FOLDER: ONNX Runtime's C++ headers into FOLDER, from Debian's package of them, for the tests of the
# compiled kernel. An older version's serve: a library asks the runtime for the interface that it was compiled for.
set -eu
python=$1 folder=$2
[ -d "$folder/usr/include/onnxruntime" ] && exit
mkdir -p "$folder"
"$python" - "$folder/headers.deb" <<'PYTHON'
import hashlib, lzma, sys, urllib.request

debian = "http://deb.debian.org/debian"
def fetch(path):
    return urllib.request.urlopen(f"{debian}/{path}", timeout=60).read()

index = lzma.decompress(fetch("dists/trixie/main/binary-amd64/Packages.xz")).decode()
entry = next(entry for entry in index.split("\n\n") if entry.startswith("Package: libonnxruntime-dev\n"))
fields = dict(line.split(": ", 1) for line in entry.splitlines() if ": " in line)
package = fetch(fields["Filename"])
if hashlib.sha256(package).hexdigest() != fields["SHA256"]:
    sys.exit("headers.sh: the package differs from what Debian's index says of it")
open(sys.argv[1], "wb").write(package)
PYTHON
cd "$folder"
ar x headers.deb
tar xf data.tar.*
rm -f headers.deb data.tar.* control.tar.* debian-binary

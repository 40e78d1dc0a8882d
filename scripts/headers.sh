#!/bin/sh
# headers.sh PYTHON FOLDER: puts ONNX Runtime's C++ headers into FOLDER/usr/include/onnxruntime, from Debian's package, for
# the tests of the compiled kernel. Headers of an older version suffice: a library requests from the runtime the interface
# that it was compiled for.
set -eu
python=$1 folder=$2
[ -d "$folder" ] && exit
scratch=$(mktemp -d "$(dirname "$folder")/headers.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
"$python" - "$scratch/headers.deb" <<'PYTHON'
import hashlib, lzma, sys, urllib.request

def fetch(path):
    try:
        return urllib.request.urlopen(f"https://deb.debian.org/debian/{path}", timeout=60).read()
    except OSError as error:
        sys.exit(f"headers.sh: {path}: {error}")

index = lzma.decompress(fetch("dists/trixie/main/binary-amd64/Packages.xz")).decode()
entry = next(entry for entry in index.split("\n\n") if entry.startswith("Package: libonnxruntime-dev\n"))
fields = dict(line.split(": ", 1) for line in entry.splitlines() if ": " in line)
package = fetch(fields["Filename"])
if hashlib.sha256(package).hexdigest() != fields["SHA256"]:
    sys.exit("headers.sh: the hash of the package differs from Debian's index")
with open(sys.argv[1], "wb") as file:
    file.write(package)
PYTHON
(cd "$scratch" && ar x headers.deb && mkdir out && tar xf data.tar.* -C out)
mv "$scratch/out" "$folder"

#!/bin/sh
# install.sh DIR [PEER...]: one virtual environment a peer in DIR/PEER (their pins exclude each other).
# torch is pinned by a constraint: unpinned, its CUDA build comes, and gigabytes with it. PYTHON: 3.11.
set -eu
dir=$1; shift
python=${PYTHON:-python3.11}
mkdir -p "$dir"
echo "torch==2.13.0" > "$dir/constraints.txt"

for peer in ${*:-trl llamafactory swift axolotl}; do
    case $peer in
        trl) wanted="trl[peft]==1.16.0" ;;
        llamafactory) wanted="llamafactory==0.9.5" ;;
        swift) wanted="ms-swift==4.6.0" ;;
        axolotl) wanted="axolotl==0.19.0" ;;
        *) echo "no such peer: $peer" >&2; exit 2 ;;
    esac
    "$python" -m venv "$dir/$peer"
    "$dir/$peer/bin/pip" install --quiet --no-cache-dir --constraint "$dir/constraints.txt" "$wanted"
    if [ "$peer" = llamafactory ]; then
        # Both are CUDA builds that fail to import beside torch for CPU. It imports torchaudio, and uses neither here.
        "$dir/$peer/bin/pip" uninstall --quiet --yes torchvision torchaudio
        touch "$("$dir/$peer/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchaudio.py"
    fi
    "$dir/$peer/bin/python" -c 'import torch; print("'"$peer"'", torch.__version__)'
done

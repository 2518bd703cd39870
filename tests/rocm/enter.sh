# A container by hand, over any root: the root's own files under a throw-away layer, the simulated machine and the slices
# mounted as the CDI device of a slice mounts them. Same pids, so that a test can kill what it started.
#
# usage: sh enter.sh BASE FOLDER "SLICE…" "MINOR…" "PRELOADED…" COMMAND…   (needs root)
#   BASE       / or another root
#   FOLDER     holds machine/ (of softkfd), slices/ and parts/ (libraries and programs, found in /parts)
set -e
if [ "$1" != --inside ]; then exec unshare --mount --propagation private sh "$0" --inside "$@"; fi
shift
base=$1 folder=$2 slices=$3 minors=$4 preloaded=$5
shift 5
mount -t tmpfs none "$folder/inside"
cd "$folder/inside"
mkdir upper work root
mount -t overlay -o "lowerdir=$base,upperdir=upper,workdir=work" none root
cd root
mkdir -p proc sys dev tmp run etc parts
mount -t proc none proc
mount --rbind /sys sys
mount -t tmpfs none dev
mount -t tmpfs none run
mkdir -p dev/dri dev/shm run/softkfd run/amdvgpu
touch dev/null dev/urandom dev/kfd
mount --bind /dev/null dev/null
mount --bind /dev/urandom dev/urandom
mount --bind /dev/shm dev/shm
mount --bind "$folder/parts" parts
mount --bind "$folder/machine" run/softkfd
mount --bind "$folder/machine/dev/kfd" dev/kfd
for minor in $minors; do
  touch "dev/dri/renderD$minor"
  mount --bind "$folder/machine/dev/dri/renderD$minor" "dev/dri/renderD$minor"
done
for slice in $slices; do
  mkdir "run/amdvgpu/$slice"
  mount --bind "$folder/slices/$slice" "run/amdvgpu/$slice"
  mount -o remount,bind,ro "run/amdvgpu/$slice"
  mount --bind "$folder/slices/$slice/ledger" "run/amdvgpu/$slice/ledger"
done
for library in $preloaded; do echo "/parts/$library"; done > etc/ld.so.preload
exec chroot . "$@"

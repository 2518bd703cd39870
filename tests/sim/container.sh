# A container by hand: mounts, pids and /dev of its own, the host's programs read-only, uid 1000, no variable set.
# What a simulated slice's CDI device mounts is mounted here as softkfd/README.md says.
#
# usage: sh container.sh ROOTFS MACHINE LIBSOFTKFD CLIENT "MINOR…" COMMAND…    (ROOTFS: an empty folder; needs root)
set -e
if [ "$1" != --inside ]; then exec unshare --mount --pid --fork --kill-child sh "$0" --inside "$@"; fi
shift
rootfs=$1 machine=$2 softkfd=$3 client=$4 minors=$5
shift 5
mount -t tmpfs none "$rootfs"
cd "$rootfs"
for folder in usr bin sbin lib lib64; do
  if [ -L /$folder ]; then cp -P /$folder .
  elif [ -d /$folder ]; then mkdir $folder; mount --rbind -o ro /$folder $folder; fi
done
mkdir -p proc sys dev/dri dev/shm etc run/softkfd tmp
mount -t proc none proc
mount --rbind /sys sys
touch dev/null dev/urandom
mount --bind /dev/null dev/null
mount --bind /dev/urandom dev/urandom
cp /etc/ld.so.cache etc/
if [ -d /etc/alternatives ]; then cp -RP /etc/alternatives etc/; fi
cp "$softkfd" tmp/libsoftkfd.so
cp "$client" tmp/client
chmod 755 tmp/*
chmod 1777 tmp dev/shm
echo /tmp/libsoftkfd.so > etc/ld.so.preload
mount --bind "$machine" run/softkfd
touch dev/kfd
mount --bind "$machine/dev/kfd" dev/kfd
for minor in $minors; do
  touch dev/dri/renderD"$minor"
  mount --bind "$machine/dev/dri/renderD$minor" dev/dri/renderD"$minor"
done
exec chroot . /usr/bin/setpriv --reuid 1000 --regid 1000 --clear-groups /usr/bin/env -i "$@"

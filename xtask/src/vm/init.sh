#!/bin/busybox sh
# The first and only service of a guest: runs the tests and switches the machine off. Lines that begin with @ are
# for the host.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t securityfs security /sys/kernel/security
mount -t devtmpfs dev /dev
# Kernel messages would cut the lines of the tests apart.
dmesg -n 1
dmesg -c > /dev/null
# While a huge page is put together, its pages are not there for programs that may not wait: frames without a name, which
# tests of every name can not have.
echo never > /sys/kernel/mm/transparent_hugepage/enabled
for word in $(cat /proc/cmdline); do
    case $word in
    memscope.filter=*) filter=$(echo "${word#memscope.filter=}" | tr , ' ') ;;
    memscope.shell) shell=1 ;;
    esac
done
cd /memscope
if [ "$shell" ]; then
    setsid cttyhack sh
    poweroff -f
fi
echo "@kernel $(uname -r) $(uname -v)"
echo "@check $(./memscope-trace check --json | tr -d '\n')"
failed=0
for tests in ./deps/*; do
    # Containers take overlayfs, which guests lack; and what a hit costs is no figure where an emulator makes the code.
    MEMSCOPE_GUEST=1 MEMSCOPE_REQUIRE=native:v8,native:v9,python $tests --test-threads 1 --skip containers_ --skip the_share_of_probes_ $filter || failed=$?
done
# No program of ours is worth a warning of the kernel's: with panic_on_warn it is the end of the host.
# The one about unprivileged eBPF is what a test asks for, by that sysctl.
dmesg | grep -v 'WARNING: Unprivileged eBPF is enabled' | grep -A 20 -e WARNING: -e BUG: && failed=1
echo "@exit $failed"
poweroff -f

//! Which container and pod a process belongs to, by the names that runtimes give their cgroups.

use crate::model::Container;

/// Reads /proc/PID/cgroup: a line `0::PATH`, or with version 1 a line `N:CONTROLLERS:PATH` for each hierarchy.
pub fn parse(cgroup: &str) -> Option<Container> {
    cgroup.lines().filter_map(|line| line.splitn(3, ':').nth(2)).find_map(|path| {
        // docker-ID.scope, cri-containerd-ID.scope, crio-ID.scope, libpod-ID.scope, /docker/ID, /kubepods/…/ID
        let id = path.rsplit(['/', ':']).find_map(|part| {
            let name = part.strip_suffix(".scope").unwrap_or(part);
            let id = name.rsplit('-').next()?;
            (id.len() == 64 && id.bytes().all(|b| b.is_ascii_hexdigit())).then_some(id)
        })?;
        // kubepods-besteffort-podUID.slice (with _ for -), /podUID/
        let pod = path.split(['/', ':']).find_map(|part| {
            let (_, uid) = part.strip_suffix(".slice").unwrap_or(part).rsplit_once("pod")?;
            let uid = uid.replace('_', "-");
            let is_uid = uid.len() == 36 && uid.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-');
            is_uid.then_some(uid)
        });
        Some(Container { id: id.to_owned(), pod })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "3fa4c1d2e5b60718293a4b5c6d7e8f90112233445566778899aabbccddeeff00";

    #[test]
    fn containers_are_known_by_what_runtimes_call_their_cgroups() {
        let uid = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0";
        let slice = uid.replace('-', "_");
        for (path, pod) in [
            (format!("0::/system.slice/docker-{ID}.scope"), None),
            (format!("12:memory:/docker/{ID}\n1:name=systemd:/docker/{ID}"), None),
            (format!("0::/machine.slice/libpod-{ID}.scope/container"), None),
            (format!("0::/kubepods.slice/kubepods-pod{slice}.slice/cri-containerd-{ID}.scope"), Some(uid)),
            (format!("4:cpu:/kubepods/burstable/pod{uid}/{ID}"), Some(uid)),
            (format!("0::/kubepods-besteffort-pod{slice}.slice:cri-containerd:{ID}"), Some(uid)),
        ] {
            let container = parse(&path);
            assert_eq!(container, Some(Container { id: ID.into(), pod: pod.map(str::to_owned) }), "{path}");
        }
        for path in ["0::/", "0::/user.slice/user-0.slice/session-1.scope", "", "garbage", "0::/docker/3fa4"]
        {
            assert_eq!(parse(path), None, "{path}");
        }
    }
}

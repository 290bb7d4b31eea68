//! One library file against the whole catalogue.

use std::{fs::File, sync::Arc};

use memscope_ebpf::NO_ARG;

use super::{
    cache::Cache,
    catalogue::{At, CATALOGUE, Class, MstxPythonSite, Probe, Shape, TorchNpuSite},
    elf::{Arch, ElfError, Library},
    mstx_python::MstxPython,
    torch_npu::{MarkSite, ReportLayout, TorchNpu},
};

/// A row of the catalogue found in a file.
#[derive(Debug, Clone, Copy)]
pub struct Found {
    pub probe: &'static Probe,
    /// File offset in bytes.
    pub offset: u64,
    /// The row's shape, adapted to this build.
    pub shape: Shape,
    pub report_layout: Option<ReportLayout>,
}

/// What a file holds.
#[derive(Debug, Clone, Default)]
pub struct ResolvedFile {
    pub arch: Option<Arch>,
    pub build_id: Option<Arc<str>>,
    pub found: Vec<Found>,
    /// Rows that this file should have and lacks, and why.
    pub missing: Vec<(&'static Probe, String)>,
    /// Why the file could not be read as a library, where it could not.
    pub error: Option<String>,
}

/// Resolves files; what takes long is kept on disk by build-id.
#[derive(Debug, Default)]
pub struct Resolver {
    cache: Cache,
}

impl Resolver {
    /// Resolves one file. `path` is its name in the process, for messages and to know what to expect in it.
    pub fn resolve(&self, file: &File, path: &str) -> ResolvedFile {
        let result =
            file.try_clone().map_err(|source| ElfError::Io { path: path.into(), source }).and_then(|file| {
                let library = Library::open(file, path)?;
                self.resolve_library(&library, path)
            });
        result.unwrap_or_else(|e| ResolvedFile { error: Some(e.to_string()), ..ResolvedFile::default() })
    }

    /// What torch_npu's task queue tells, of a file that is its library: the rows of [`Class::Queue`].
    pub fn queue(&self, file: &File, path: &str) -> Result<Vec<Found>, String> {
        let file = file.try_clone().map_err(|e| e.to_string())?;
        let library = Library::open(file, path).map_err(|e| e.to_string())?;
        let sites = self.cache.torch_npu_queue(&library).map_err(|e| e.to_string())?;
        let sites = sites.map_err(|missing| missing.to_string())?;
        let rows = CATALOGUE.iter().filter_map(|probe| {
            let offset = match probe.at {
                At::TorchNpu(TorchNpuSite::Enqueue) => sites.enqueue,
                At::TorchNpu(TorchNpuSite::Run) => sites.run,
                _ => return None,
            };
            Some(Found { probe, offset, shape: probe.shape, report_layout: None })
        });
        Ok(rows.collect())
    }

    fn resolve_library(&self, library: &Library, path: &str) -> Result<ResolvedFile, ElfError> {
        let mut resolved = ResolvedFile {
            arch: Some(library.arch()),
            build_id: library.build_id().map(Into::into),
            ..ResolvedFile::default()
        };
        let name = path.rsplit('/').next().unwrap_or(path);
        let expected = |probe: &Probe| probe.libraries.iter().any(|library| name.starts_with(library));
        let torch_npu =
            name.starts_with("libtorch_npu").then(|| self.cache.torch_npu(library)).transpose()?;
        let mstx = name.starts_with("mstx.").then(|| self.cache.mstx_python(library)).transpose()?;
        for probe in CATALOGUE.iter().filter(|probe| probe.class != Class::Queue) {
            let found = match probe.at {
                At::Symbol(symbol) => library
                    .symbol(symbol)?
                    .map(|offset| (offset, probe.shape, None))
                    .ok_or_else(|| format!("{name} does not export it")),
                At::TorchNpu(site) => match &torch_npu {
                    Some(torch_npu) => torch_npu_site(torch_npu, site, probe.shape),
                    None => continue,
                },
                At::MstxPython(site) => match &mstx {
                    Some(mstx) => mstx_site(mstx, site).map(|offset| (offset, probe.shape, None)),
                    None => continue,
                },
            };
            match found {
                Ok((offset, shape, report_layout)) => {
                    resolved.found.push(Found { probe, offset, shape, report_layout });
                }
                Err(why) if expected(probe) => resolved.missing.push((probe, why)),
                Err(_) => {}
            }
        }
        Ok(resolved)
    }
}

type Place = Result<(u64, Shape, Option<ReportLayout>), String>;

fn torch_npu_site(torch_npu: &TorchNpu, site: TorchNpuSite, shape: Shape) -> Place {
    let marks = match site {
        TorchNpuSite::Enqueue | TorchNpuSite::Run => return Err("it is looked for when it is wanted".into()),
        TorchNpuSite::PoolReport => {
            return match &torch_npu.pool_report {
                Ok(report) => Ok((report.offset, shape, Some(report.layout))),
                Err(missing) => Err(missing.to_string()),
            };
        }
        TorchNpuSite::Mark => &torch_npu.mark,
        TorchNpuSite::RangeStart => &torch_npu.range_start,
        TorchNpuSite::RangeEnd => &torch_npu.range_end,
        TorchNpuSite::RangePush => &torch_npu.range_push,
        TorchNpuSite::RangePop => &torch_npu.range_pop,
    };
    let MarkSite { offset, args } = marks.as_ref().map_err(ToString::to_string)?;
    let shape =
        Shape::Mark { arg: args.text.unwrap_or(NO_ARG), domain: args.domain.unwrap_or(NO_ARG), id: false };
    Ok((*offset, shape, None))
}

fn mstx_site(mstx: &MstxPython, site: MstxPythonSite) -> Result<u64, String> {
    let found = match site {
        MstxPythonSite::Mark => &mstx.mark,
        MstxPythonSite::RangeStart => &mstx.range_start,
        MstxPythonSite::RangeEnd => &mstx.range_end,
    };
    found.as_ref().copied().map_err(ToString::to_string)
}

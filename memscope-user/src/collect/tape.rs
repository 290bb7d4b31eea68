//! Recorded streams: the records of a trace as they came out of the ring buffer, and what their sites are. With them the
//! collector is measured apart from everything else.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, Read, Write},
    path::Path,
};

use memscope_ebpf::WIRE_VERSION;
use serde::{Deserialize, Serialize};

use super::decode::Decoder;
use crate::probes::{
    catalogue::{CATALOGUE, Probe},
    torch_npu::ReportLayout,
};

const MAGIC: &[u8; 8] = b"memscope";
/// Bytes of a part at most: of the largest record, with room.
const MOST: u32 = 1 << 16;

#[derive(Debug, thiserror::Error)]
pub enum TapeError {
    #[error("can not read the recorded stream: {0}")]
    Read(#[from] io::Error),
    #[error("this is no recorded stream of this version; record it anew with --record")]
    Foreign,
    #[error(
        "the recorded stream names a site that is not in the catalogue: {0}; record it anew with --record"
    )]
    Site(String),
}

/// What records with a number are of.
#[derive(Serialize, Deserialize)]
struct SiteEntry {
    site: usize,
    name: String,
    layout: Option<ReportLayout>,
}

/// Writes a stream. An error ends it, and is told when it is closed.
pub struct Recorder {
    out: BufWriter<File>,
    failed: Option<io::Error>,
}

impl Recorder {
    pub fn create(path: &Path) -> io::Result<Self> {
        let mut out = BufWriter::new(File::create(path)?);
        out.write_all(MAGIC)?;
        out.write_all(&WIRE_VERSION.to_le_bytes())?;
        Ok(Self { out, failed: None })
    }

    pub fn site(&mut self, site: usize, probe: &Probe, layout: Option<ReportLayout>) {
        let entry = SiteEntry { site, name: probe.site.to_owned(), layout };
        if let Ok(text) = serde_json::to_vec(&entry) {
            self.part(b'S', &text);
        }
    }

    pub fn record(&mut self, record: &[u8]) {
        self.part(b'R', record);
    }

    fn part(&mut self, kind: u8, bytes: &[u8]) {
        if self.failed.is_some() {
            return;
        }
        let length = (bytes.len() as u32).to_le_bytes();
        let head = [&[kind][..], &length].concat();
        let written = self.out.write_all(&head).and_then(|()| self.out.write_all(bytes));
        self.failed = written.err();
    }

    pub fn close(mut self) -> io::Result<()> {
        match self.failed.take() {
            Some(why) => Err(why),
            None => self.out.flush(),
        }
    }
}

/// A stream in memory.
pub struct Tape {
    sites: Vec<(usize, &'static Probe, Option<ReportLayout>)>,
    bytes: Vec<u8>,
    /// Where each record ends.
    ends: Vec<usize>,
}

impl Tape {
    pub fn read(path: &Path) -> Result<Self, TapeError> {
        let mut from = BufReader::new(File::open(path)?);
        let mut head = [0; 12];
        from.read_exact(&mut head)?;
        if head[..8] != MAGIC[..] || head[8..] != WIRE_VERSION.to_le_bytes() {
            return Err(TapeError::Foreign);
        }
        let mut tape = Self { sites: Vec::new(), bytes: Vec::new(), ends: Vec::new() };
        while !from.fill_buf()?.is_empty() {
            let mut head = [0; 5];
            from.read_exact(&mut head)?;
            let [kind, length @ ..] = head;
            let length = u32::from_le_bytes(length);
            if length > MOST {
                return Err(TapeError::Foreign);
            }
            let begin = tape.bytes.len();
            tape.bytes.resize(begin + length as usize, 0);
            from.read_exact(tape.bytes.get_mut(begin..).unwrap_or_default())?;
            if kind == b'S' {
                let site = serde_json::from_slice::<SiteEntry>(tape.bytes.get(begin..).unwrap_or_default())
                    .map_err(|_| TapeError::Foreign)?;
                tape.bytes.truncate(begin);
                let probe = CATALOGUE.iter().find(|probe| probe.site == site.name);
                tape.sites.push((site.site, probe.ok_or(TapeError::Site(site.name))?, site.layout));
            } else {
                tape.ends.push(tape.bytes.len());
            }
        }
        Ok(tape)
    }

    /// Tells a decoder what the numbers in records are.
    pub fn introduce_sites(&self, decoder: &mut Decoder) {
        for (site, probe, layout) in &self.sites {
            decoder.set_site(*site, probe, *layout);
        }
    }

    /// Number of records.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    pub fn records(&self) -> impl Iterator<Item = &[u8]> {
        let begins = std::iter::once(0).chain(self.ends.iter().copied());
        begins.zip(&self.ends).filter_map(|(begin, end)| self.bytes.get(begin..*end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_read_as_it_was_written_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stream");
        let mut recorder = Recorder::create(&path).unwrap();
        recorder.site(3, &CATALOGUE[0], None);
        recorder.record(b"one");
        recorder.record(b"and two");
        recorder.close().unwrap();
        let tape = Tape::read(&path).unwrap();
        assert_eq!(tape.records().collect::<Vec<_>>(), [&b"one"[..], b"and two"]);
        assert_eq!((tape.len(), tape.sites[0].0, tape.sites[0].1.site), (2, 3, CATALOGUE[0].site));
        let mut bytes = std::fs::read(&path).unwrap();
        for end in 0..bytes.len() {
            // Cut off, or with a length that lies: no panic, no gigabytes.
            std::fs::write(&path, &bytes[..end]).unwrap();
            let _ = Tape::read(&path);
        }
        bytes[13..17].fill(0xff);
        std::fs::write(&path, &bytes).unwrap();
        assert!(matches!(Tape::read(&path), Err(TapeError::Foreign)));
    }
}

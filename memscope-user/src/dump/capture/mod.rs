//! Captures: dumps for long traces, as Arrow IPC streams compressed with zstd. A file is valid to its last whole batch
//! at any time, and batches are written at least once a second.
//!
//! With a bound on their size, captures are written in segments, one file after another, and the oldest go. So that
//! nothing that still matters goes with them, a segment begins with what is carried over: a row for each block that is
//! alive, the operator that it was allocated in, and the marks, so that steps keep their numbers.

mod alive;
mod batch;
mod message;
mod read;
mod write;

use std::path::{Path, PathBuf};

pub(super) use read::{CaptureSource, is_capture};
pub(super) use write::CaptureFile;

/// Ending of the name: the registered one of Arrow streams.
const EXTENSION: &str = "arrows";

/// Keys of a stream's metadata.
const METADATA_FORMAT: &str = "memscope.capture";
const METADATA_SEGMENT: &str = "memscope.segment";
/// Rows in the segments before this one.
const METADATA_ROWS_BEFORE: &str = "memscope.rows_before";

/// Version of the format.
const FORMAT: &str = "1";

/// What a column holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    U64,
    U32,
    U16,
    I64,
    /// ns since the epoch.
    Time,
    Text,
    Flag,
}

macro_rules! columns {
    ($($name:ident $text:literal $kind:ident,)*) => {
        /// A column of the table.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        enum Column { $($name,)* }

        impl Column {
            const ALL: [(Column, &str, Kind); [$($text,)*].len()] = [$((Column::$name, $text, Kind::$kind),)*];
        }
    };
}

columns! {
    Id "id" U64,
    Event "event" Text,
    EventType "event_type" Text,
    Name "name" Text,
    Time "time" Time,
    Pid "pid" U32,
    Tid "tid" U32,
    Device "device" U16,
    Ptr "ptr" U64,
    AllocationId "allocation_id" U64,
    Size "size" U64,
    Total "total" U64,
    Used "used" U64,
    Owner "owner" Text,
    Pool "pool" Text,
    PageType "page_type" Text,
    AllocType "alloc_type" Text,
    Api "api" Text,
    ApiSize "api_size" U64,
    StreamId "stream_id" U64,
    Range "range" U64,
    Domain "domain" Text,
    Handle "handle" U64,
    Func "func" Text,
    ReqSize "req_size" U64,
    Ret "ret" I64,
    Shadow "shadow" Flag,
    Python "python_stack" Text,
    Native "native_stack" Text,
    Carried "carried" Flag,
}

impl Column {
    /// The column of an attribute; `None` for what others say already: the address, and that host memory is pinned.
    fn of_attr(key: &str) -> Option<Column> {
        Some(match key {
            "allocation_id" => Column::AllocationId,
            "size" => Column::Size,
            "total" => Column::Total,
            "used" => Column::Used,
            "owner" => Column::Owner,
            "pool" | "type" => Column::Pool,
            "page_type" => Column::PageType,
            "alloc_type" => Column::AllocType,
            "api" => Column::Api,
            "api_size" => Column::ApiSize,
            "streamId" => Column::StreamId,
            "range" => Column::Range,
            "domain" => Column::Domain,
            "handle" => Column::Handle,
            "func" => Column::Func,
            "req_size" => Column::ReqSize,
            "ret" => Column::Ret,
            "shadow" => Column::Shadow,
            _ => return None,
        })
    }
}

/// Name of the file that a capture begins with.
pub(super) fn first_name(stem: &str, bound: Option<u64>) -> String {
    format!("{}.{EXTENSION}", segment_stem(stem, bound.map(|_| 1)))
}

/// Name of a segment; captures without a bound have one, without a number.
fn segment_stem(stem: &str, number: Option<u64>) -> String {
    match number {
        Some(number) => format!("{stem}.{number}"),
        None => stem.to_owned(),
    }
}

/// The capture that a file is a segment of, and its number in it.
fn segment_of(path: &Path) -> (PathBuf, u64) {
    let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let stem = name.strip_suffix(&format!(".{EXTENSION}")).unwrap_or(&name);
    let stem = stem.strip_suffix(".incomplete").unwrap_or(stem);
    let numbered = stem.rsplit_once('.').and_then(|(stem, number)| Some((stem, number.parse().ok()?)));
    let (stem, number) = numbered.unwrap_or((stem, 0));
    (path.with_file_name(stem), number)
}

/// Puts segments of one capture together, in order. Takes the files that are captures.
pub(super) fn captures_of(paths: impl Iterator<Item = PathBuf>) -> Vec<Vec<PathBuf>> {
    let mut captures: Vec<(PathBuf, Vec<(u64, PathBuf)>)> = Vec::new();
    for path in paths {
        let (capture, number) = segment_of(&path);
        match captures.iter_mut().find(|(known, _)| *known == capture) {
            Some((_, segments)) => segments.push((number, path)),
            None => captures.push((capture, vec![(number, path)])),
        }
    }
    let in_order = |(_, mut segments): (PathBuf, Vec<(u64, PathBuf)>)| {
        segments.sort_unstable();
        segments.into_iter().map(|(_, path)| path).collect()
    };
    captures.into_iter().map(in_order).collect()
}

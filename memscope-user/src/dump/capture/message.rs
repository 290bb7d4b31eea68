//! The messages of a stream, one after another, none of them believed: what arrow would take on trust, or panic at, is
//! checked here first.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read};

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::read_record_batch;
use arrow_ipc::{Message, RecordBatch as Head, root_as_message};
use arrow_schema::{ArrowError, DataType, Schema, SchemaRef};

/// What each message begins with, before the length of its head.
const CONTINUATION: [u8; 4] = [0xff; 4];

/// Bytes of the head of a message at most.
const HEAD_MAX: u32 = 1 << 20;

/// Bytes of a batch at most, as it is in the file and when it is decompressed.
const BATCH_MAX: u64 = 1 << 28;

/// Bytes of the length before each compressed buffer.
const LENGTH: usize = size_of::<i64>();

#[derive(Debug, thiserror::Error)]
pub(super) enum MessageError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the file ends within a batch: its writer was killed, or the disk was full")]
    CutOff,
    #[error("{0}")]
    Malformed(&'static str),
    #[error("{0}")]
    Arrow(#[from] ArrowError),
}

/// The batches of a stream.
pub(super) struct Batches {
    input: BufReader<File>,
    schema: SchemaRef,
    /// The message that is read, its head and then its body.
    message: Vec<u8>,
}

impl Batches {
    /// Reads up to the schema.
    pub fn open(file: File) -> Result<Self, MessageError> {
        const NO_SCHEMA: MessageError = MessageError::Malformed("it does not begin with a schema");
        let input = BufReader::with_capacity(1 << 18, file);
        let mut batches = Batches { input, schema: Schema::empty().into(), message: Vec::new() };
        let head = batches.read_message()?.ok_or(NO_SCHEMA)?;
        let message = batches.head(head)?;
        let schema = message.header_as_schema().ok_or(NO_SCHEMA)?;
        batches.schema = try_fb_to_schema(schema)?.into();
        Ok(batches)
    }

    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// The next batch; `None` at the end of the stream, also where nothing says that it is the end.
    pub fn next(&mut self) -> Result<Option<RecordBatch>, MessageError> {
        let Some(head) = self.read_message()? else { return Ok(None) };
        let message = self.head(head)?;
        let batch = message.header_as_record_batch().ok_or(MessageError::Malformed("this is no batch"))?;
        let body = self.message.get(head..).unwrap_or_default();
        check(&batch, body, &self.schema).map_err(MessageError::Malformed)?;
        let body = Buffer::from(body);
        let schema = self.schema.clone();
        Ok(Some(read_record_batch(&body, batch, schema, &HashMap::new(), None, &message.version())?))
    }

    fn head(&self, length: usize) -> Result<Message<'_>, MessageError> {
        root_as_message(self.message.get(..length).unwrap_or_default())
            .map_err(|_| MessageError::Malformed("the head of a message is malformed"))
    }

    /// Reads the next message, and returns the length of its head; `None` at the end.
    fn read_message(&mut self) -> Result<Option<usize>, MessageError> {
        let mut prefix = [0; 8];
        let length = fill(&mut self.input, &mut prefix)?;
        let head = u32::from_le_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]);
        match length {
            0 => return Ok(None),
            8 if prefix[..4] != CONTINUATION => {
                return Err(MessageError::Malformed("no message begins here"));
            }
            8 if head == 0 => return Ok(None),
            8 if head > HEAD_MAX => return Err(MessageError::Malformed("the head of a message is too long")),
            8 => {}
            _ => return Err(MessageError::CutOff),
        }
        let head = head as usize;
        self.message.clear();
        self.read(head)?;
        let body = u64::try_from(self.head(head)?.bodyLength()).ok().filter(|length| *length <= BATCH_MAX);
        let body = body.ok_or(MessageError::Malformed("a batch is too long"))?;
        self.read(body as usize)?;
        Ok(Some(head))
    }

    /// Appends bytes of the file. Memory is taken as they come, not as the file promises.
    fn read(&mut self, bytes: usize) -> Result<(), MessageError> {
        match (&mut self.input).take(bytes as u64).read_to_end(&mut self.message)? {
            count if count == bytes => Ok(()),
            _ => Err(MessageError::CutOff),
        }
    }
}

fn fill(input: &mut impl Read, out: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = out.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match input.read(rest) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Bytes of the values in each buffer of a column: which rows have one, the values; of texts, where they end, and these.
fn widths(kind: &DataType) -> &'static [u64] {
    match kind {
        DataType::Utf8 => &[1, 4, 1],
        DataType::Boolean => &[1, 1],
        DataType::UInt16 => &[1, 2],
        DataType::UInt32 => &[1, 4],
        _ => &[1, 8],
    }
}

/// Checks that a batch has as many columns and buffers as the schema, all within its body, and what they will be
/// decompressed to.
fn check(batch: &Head<'_>, body: &[u8], schema: &SchemaRef) -> Result<(), &'static str> {
    let (Some(nodes), Some(buffers)) = (batch.nodes(), batch.buffers()) else {
        return Err("a batch without columns");
    };
    let widths: Vec<u64> =
        schema.fields().iter().flat_map(|field| widths(field.data_type())).copied().collect();
    if nodes.len() != schema.fields().len() || buffers.len() != widths.len() {
        return Err("a batch has other columns than the schema");
    }
    let rows = batch.length();
    if rows < 0 || nodes.iter().any(|node| node.length() != rows || !(0..=rows).contains(&node.null_count()))
    {
        return Err("the columns of a batch differ in length");
    }
    let mut total = 0u64;
    for (buffer, width) in buffers.iter().zip(widths) {
        let place = usize::try_from(buffer.offset()).ok().zip(usize::try_from(buffer.length()).ok());
        let place = place.and_then(|(offset, length)| body.get(offset..offset.checked_add(length)?));
        let bytes = place.ok_or("a column is not within its batch")?;
        let length = match (batch.compression(), bytes.first_chunk::<LENGTH>()) {
            (Some(_), Some(length)) => match i64::from_le_bytes(*length) {
                // As it is.
                -1 => bytes.len() as u64,
                length => u64::try_from(length).map_err(|_| "the length of a column is negative")?,
            },
            _ => bytes.len() as u64,
        };
        if length % width != 0 {
            return Err("a column ends within a value");
        }
        total = total.saturating_add(length);
        if total > BATCH_MAX {
            return Err("a batch is too large");
        }
    }
    Ok(())
}

//! Rows that are gathered to be one batch of a stream, and the columns of a batch that was read.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::builder::{ArrayBuilder, BooleanBuilder, PrimitiveBuilder, StringBuilder};
use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Int64Type, TimestampNanosecondType, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::{ArrowError, DataType, Field, Schema, TimeUnit};

use crate::dump::record::{Label, Owner, Record, Value};
use crate::dump::row::{Place, Row};
use crate::dump::stack::{self, StackStyle};
use crate::text::sanitize;

use super::{Column, Kind};

/// Rows of a batch at most.
const ROWS: usize = 1 << 13;

/// Bytes of the texts of a batch from which on it is full.
const TEXT_BYTES: usize = 1 << 22;

const UTC: &str = "UTC";

fn type_of(kind: Kind) -> DataType {
    match kind {
        Kind::U64 => DataType::UInt64,
        Kind::U32 => DataType::UInt32,
        Kind::U16 => DataType::UInt16,
        Kind::I64 => DataType::Int64,
        Kind::Time => DataType::Timestamp(TimeUnit::Nanosecond, Some(UTC.into())),
        Kind::Text => DataType::Utf8,
        Kind::Flag => DataType::Boolean,
    }
}

pub(super) fn schema(metadata: HashMap<String, String>) -> Schema {
    let required = [Column::Id, Column::Event, Column::EventType, Column::Time, Column::Pid, Column::Tid];
    let fields = Column::ALL.map(|(column, name, kind)| {
        let nullable = !required.contains(&column) && kind != Kind::Flag;
        Field::new(name, type_of(kind), nullable)
    });
    Schema::new_with_metadata(fields.to_vec(), metadata)
}

/// The values of a column so far.
enum Values {
    U64(PrimitiveBuilder<UInt64Type>),
    U32(PrimitiveBuilder<UInt32Type>),
    U16(PrimitiveBuilder<UInt16Type>),
    I64(PrimitiveBuilder<Int64Type>),
    Time(PrimitiveBuilder<TimestampNanosecondType>),
    Text(StringBuilder),
    Flag(BooleanBuilder),
}

impl Values {
    fn new(kind: Kind) -> Self {
        match kind {
            Kind::U64 => Values::U64(PrimitiveBuilder::new()),
            Kind::U32 => Values::U32(PrimitiveBuilder::new()),
            Kind::U16 => Values::U16(PrimitiveBuilder::new()),
            Kind::I64 => Values::I64(PrimitiveBuilder::new()),
            Kind::Time => Values::Time(PrimitiveBuilder::new().with_timezone(UTC)),
            Kind::Text => Values::Text(StringBuilder::new()),
            Kind::Flag => Values::Flag(BooleanBuilder::new()),
        }
    }

    fn number(&mut self, number: u64) {
        match self {
            Values::U64(values) => values.append_value(number),
            Values::U32(values) => values.append_value(number as u32),
            Values::U16(values) => values.append_value(number as u16),
            Values::I64(values) => values.append_value(number as i64),
            Values::Time(values) => values.append_value(number as i64),
            Values::Text(values) => values.append_value(number.to_string()),
            Values::Flag(values) => values.append_value(number != 0),
        }
    }

    fn text(&mut self, text: &str) {
        match self {
            Values::Text(values) => values.append_value(text),
            Values::Flag(values) => values.append_value(text == "true"),
            _ => {}
        }
    }

    /// Makes up for what the last rows did not say.
    fn fill(&mut self, rows: usize) {
        fn nulls<T: ArrowPrimitiveType>(values: &mut PrimitiveBuilder<T>, rows: usize) {
            values.append_nulls(rows.saturating_sub(values.len()));
        }
        match self {
            Values::U64(values) => nulls(values, rows),
            Values::U32(values) => nulls(values, rows),
            Values::U16(values) => nulls(values, rows),
            Values::I64(values) => nulls(values, rows),
            Values::Time(values) => nulls(values, rows),
            Values::Text(values) => {
                values.append_nulls(rows.saturating_sub(values.len()));
            }
            Values::Flag(values) => {
                values.append_n(rows.saturating_sub(values.len()), false);
            }
        }
    }

    fn finish(&mut self) -> ArrayRef {
        match self {
            Values::U64(values) => Arc::new(values.finish()),
            Values::U32(values) => Arc::new(values.finish()),
            Values::U16(values) => Arc::new(values.finish()),
            Values::I64(values) => Arc::new(values.finish()),
            Values::Time(values) => Arc::new(values.finish()),
            Values::Text(values) => Arc::new(values.finish()),
            Values::Flag(values) => Arc::new(values.finish()),
        }
    }
}

/// Gathers rows.
pub(super) struct Gathered {
    schema: Arc<Schema>,
    columns: Vec<Values>,
    rows: usize,
    text_bytes: usize,
    scratch: String,
}

impl Gathered {
    pub fn new(schema: Arc<Schema>) -> Self {
        let columns = Column::ALL.iter().map(|(_, _, kind)| Values::new(*kind)).collect();
        Gathered { schema, columns, rows: 0, text_bytes: 0, scratch: String::new() }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn is_full(&self) -> bool {
        self.rows >= ROWS || self.text_bytes >= TEXT_BYTES
    }

    pub fn push(&mut self, id: u64, row: &Row, record: &Record<'_>, carried: bool) {
        self.number(Column::Id, id);
        self.text(Column::Event, record.event);
        self.text(Column::EventType, record.event_type);
        match &record.name {
            Label::None => {}
            Label::Number(number) => self.number(Column::Name, *number),
            Label::Text(name) => self.text(Column::Name, &sanitize(name.as_bytes())),
            Label::Mark(text) => self.text(Column::Name, &sanitize(text.as_bytes())),
        }
        self.number(Column::Time, row.time.0);
        self.number(Column::Pid, row.tgid.0.into());
        self.number(Column::Tid, row.tid.0.into());
        // Host memory needs no device: its event type tells.
        if let Some(Place::Npu(device)) = record.place {
            self.number(Column::Device, device.0.into());
        }
        if let Some(ptr) = record.ptr {
            self.number(Column::Ptr, ptr.0);
        }
        for (key, value) in &record.attrs {
            let Some(column) = Column::of_attr(key) else { continue };
            match value {
                Value::Number(number) => self.number(column, *number),
                Value::Signed(number) => self.number(column, *number as u64),
                Value::Address(ptr) => self.number(column, ptr.0),
                Value::Word(word) => self.text(column, word),
                Value::Text(text) => self.text(column, &sanitize(text.as_bytes())),
                Value::Owner(Owner { framework, module, labels }) => {
                    let labels = labels.map(|labels| sanitize(labels.as_bytes()));
                    let labels = [Some(*framework), *module, labels.as_deref()];
                    self.text(column, &labels.into_iter().flatten().collect::<Vec<_>>().join("@"));
                }
            }
        }
        if let Some(stack) = record.stack {
            let mut text = std::mem::take(&mut self.scratch);
            text.clear();
            stack::write(&mut text, stack, StackStyle::Lines, |out, line| out.push_str(line));
            if !text.is_empty() {
                self.text(Column::Python, &text);
            }
            text.clear();
            stack::write_native(&mut text, stack, StackStyle::Lines, |out, line| out.push_str(line));
            if !text.is_empty() {
                self.text(Column::Native, &text);
            }
            self.scratch = text;
        }
        if carried {
            self.number(Column::Carried, 1);
        }
        self.rows += 1;
        let rows = self.rows;
        self.columns.iter_mut().for_each(|values| values.fill(rows));
    }

    fn number(&mut self, column: Column, number: u64) {
        if let Some(values) = self.columns.get_mut(column as usize) {
            values.number(number);
        }
    }

    fn text(&mut self, column: Column, text: &str) {
        self.text_bytes += text.len();
        if let Some(values) = self.columns.get_mut(column as usize) {
            values.text(text);
        }
    }

    /// The batch, and none of it any more.
    pub fn take(&mut self) -> Result<RecordBatch, ArrowError> {
        (self.rows, self.text_bytes) = (0, 0);
        let columns = self.columns.iter_mut().map(Values::finish).collect();
        RecordBatch::try_new(self.schema.clone(), columns)
    }
}

/// A batch of a stream with our columns.
pub(super) struct Columns(RecordBatch);

impl Columns {
    /// `None`: it has other columns.
    pub fn of(batch: RecordBatch) -> Option<Self> {
        let same = Column::ALL
            .iter()
            .zip(batch.columns())
            .all(|((_, _, kind), of)| *of.data_type() == type_of(*kind));
        (same && batch.num_columns() == Column::ALL.len()).then_some(Columns(batch))
    }

    pub fn rows(&self) -> usize {
        self.0.num_rows()
    }

    fn column(&self, column: Column, row: usize) -> Option<&ArrayRef> {
        self.0.columns().get(column as usize).filter(|of| row < of.len() && !of.is_null(row))
    }

    pub fn text(&self, column: Column, row: usize) -> Option<&str> {
        Some(self.column(column, row)?.as_string_opt::<i32>()?.value(row))
    }

    pub fn flag(&self, column: Column, row: usize) -> bool {
        self.column(column, row).and_then(|of| of.as_boolean_opt()).is_some_and(|of| of.value(row))
    }

    /// A number, in the bits of its column.
    pub fn number(&self, column: Column, row: usize) -> Option<u64> {
        let of = self.column(column, row)?;
        Some(match of.data_type() {
            DataType::UInt64 => of.as_primitive_opt::<UInt64Type>()?.value(row),
            DataType::UInt32 => of.as_primitive_opt::<UInt32Type>()?.value(row).into(),
            DataType::UInt16 => of.as_primitive_opt::<UInt16Type>()?.value(row).into(),
            DataType::Int64 => of.as_primitive_opt::<Int64Type>()?.value(row) as u64,
            _ => of.as_primitive_opt::<TimestampNanosecondType>()?.value(row) as u64,
        })
    }
}

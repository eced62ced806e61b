//! A transport that remembers its hops, to send the same messages again with nothing to compute:
//! what part of their time was hidden behind computing can't be said without knowing that time.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use longspan_ring::{Buffer, Failure, Hear, Hop, Incoming, Meanwhile, Outgoing, Transport};

/// Remembers into a [`Log`].
pub(super) struct Recorder<'t> {
    transport: &'t mut dyn Transport,
    log: Log,
}

/// Hops in their order. Clones are the same one.
#[derive(Clone, Default)]
pub(super) struct Log(Rc<RefCell<Vec<Shape>>>);

/// Ranks and bytes of what was sent and received.
struct Shape {
    sends: Vec<(usize, usize)>,
    receives: Vec<(usize, usize)>,
}

impl<'t> Recorder<'t> {
    pub(super) fn new(transport: &'t mut dyn Transport, log: Log) -> Self {
        Recorder { transport, log }
    }
}

impl Log {
    pub(super) fn forget(&self) {
        self.0.borrow_mut().clear();
    }

    /// The time of the same messages alone.
    pub(super) fn replay(
        &self,
        transport: &mut dyn Transport,
        patience: Duration,
    ) -> Result<Duration, Failure> {
        let mut total = Duration::ZERO;
        for shape in &*self.0.borrow() {
            let bytes = Buffer::zeroed;
            let send = |&(to, len): &(usize, usize)| Outgoing { to, bytes: bytes(len) };
            let receive = |&(from, len): &(usize, usize)| Incoming { from, bytes: bytes(len) };
            let mut sends: Vec<_> = shape.sends.iter().map(send).collect();
            let mut receives: Vec<_> = shape.receives.iter().map(receive).collect();
            let hop = Hop { sends: &mut sends, receives: &mut receives, patience };
            let start = Instant::now();
            transport.hop(hop, &mut |_| ())?;
            total += start.elapsed();
        }
        Ok(total)
    }
}

impl Transport for Recorder<'_> {
    fn rank(&self) -> usize {
        self.transport.rank()
    }

    fn size(&self) -> usize {
        self.transport.size()
    }

    fn hop(&mut self, hop: Hop<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<(), Failure> {
        self.log.0.borrow_mut().push(Shape {
            sends: hop.sends.iter().map(|send| (send.to, send.bytes.len())).collect(),
            receives: hop
                .receives
                .iter()
                .map(|receive| (receive.from, receive.bytes.len()))
                .collect(),
        });
        self.transport.hop(hop, meanwhile)
    }

    fn farewell(&mut self, told: &[u8], hear: &mut Hear<'_>, patience: Duration) {
        self.transport.farewell(told, hear, patience);
    }
}

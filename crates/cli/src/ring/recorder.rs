//! A transport that records its hops, to replay the same messages with nothing to compute: the
//! share of transfer time that was hidden is relative to that time.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use longspan_ring::{
    AbortListener, Buffer, Failure, Hop, Incoming, Meanwhile, Outgoing, Transport,
};

/// Records into a [`Log`].
pub(super) struct Recorder<'t> {
    transport: &'t mut dyn Transport,
    log: Log,
}

/// Hops in their order. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Log(Rc<RefCell<Vec<Shape>>>);

/// Peers and bytes of sends and receives.
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
    pub(super) fn clear(&self) {
        self.0.borrow_mut().clear();
    }

    /// Time of the same messages alone.
    pub(super) fn replay(
        &self,
        transport: &mut dyn Transport,
        timeout: Duration,
    ) -> Result<Duration, Failure> {
        let mut total = Duration::ZERO;
        for shape in &*self.0.borrow() {
            let bytes = Buffer::zeroed;
            let send = |&(to, len): &(usize, usize)| Outgoing { to, bytes: bytes(len) };
            let receive = |&(from, len): &(usize, usize)| Incoming { from, bytes: bytes(len) };
            let mut sends: Vec<_> = shape.sends.iter().map(send).collect();
            let mut receives: Vec<_> = shape.receives.iter().map(receive).collect();
            let hop = Hop { sends: &mut sends, receives: &mut receives, timeout };
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

    fn broadcast_abort(&mut self, told: &[u8], hear: &mut AbortListener<'_>, timeout: Duration) {
        self.transport.broadcast_abort(told, hear, timeout);
    }
}
